"""Prints the result of a probe in a terminal."""

from __future__ import annotations

from healcore.tools.probe.result import ProbeResult
from healcore.tools.terminal import clean, echo


def show(result: ProbeResult) -> None:
    """Prints the verdict, the checks, the layers that deviate most and the notes."""
    score = result.facts.get("score")
    lines = [f"{result.verdict.value:5} {result.subject}"]
    if score is not None:
        lines[0] += f"  score {score:.2f}"
    for check in result.checks:
        label = check.verdict.value if check.decides else "-"
        lines.append(f"  {label:5}  {check.name.replace('_', ' '):18}  {check.message}")
    lines += [
        f"  {layer['layer']}: {layer['parameter']} has a gradient rms of "
        f"{layer['gradient_rms']:.2e}, and {layer['ratio']:.3g} times the second moment of similar "
        f"parameters ({layer['sigmas']:+.1f} sigma)"
        for layer in result.facts.get("top", ())
    ]
    lines += [f"  note: {note}" for note in result.notes]
    echo("\n".join(clean(line, keep="") for line in lines))

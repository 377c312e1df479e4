"""The cells of examples/tutorial.ipynb run one after the other, as in Jupyter."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "tutorial.ipynb"


def test_the_cells_run_and_the_healed_run_ends_well(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {"__name__": "__main__"}
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        if cell["cell_type"] != "code":
            continue
        source = "".join(cell["source"])
        if "raises-exception" in cell["metadata"].get("tags", []):
            with pytest.raises(KeyboardInterrupt):
                exec(source, scope)
            assert scope["healer"].is_open
        else:
            exec(source, scope)
    out, lines = capsys.readouterr()
    nothing, attach, healed = (float(x) for x in re.findall(r"loss on unseen data (\S+)", out))
    assert nothing != nothing  # NaN
    assert attach > 0.5
    assert healed < 0.2
    assert "resumes at step 200" in out
    assert re.search(r"steps 600, rollbacks [1-3]\n", out)
    assert "rolled back to checkpoint" in lines

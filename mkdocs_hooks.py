"""Pages of the site that are made by `make docs`: Home, from README.md, and the API reference.

The reference has one page for each public symbol. The symbols are read from the source, without an
import: the environment of `make docs` has neither NumPy nor a framework. A test compares them with
those of the imported package (`tests/packaging/test_api.py`).
"""

from __future__ import annotations

import ast
import builtins
import functools
import html
import re
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent
MODULES = {
    "healcore": "The Healer, its options and its results.",
    "healcore.errors": "Exceptions; the usual five are in `healcore`.",
    "healcore.torch": "Optimizers, trainers and stores of torch.",
    "healcore.torch.store": "Loads a state of torch in place.",
    "healcore.jax": "Optax transformations, functions on their states, and stores of JAX.",
    "healcore.jax.flax_nnx": "Helpers for Flax nnx.",
    "healcore.jax.flax_linen": "Helpers for Flax linen.",
    "healcore.policy": "Loads, writes and compares policies.",
    "healcore.core.engine": "The engine, for a framework without an adapter.",
    "healcore.core.signals": "What the engine judges.",
}
"""Public module -> what it has. A symbol of several modules has its page in the first."""
MEMBERS = {"healcore.core.signals": ["Signals"]}
"""Public members of a module that has internal ones too, and no `__all__`."""
FIRST = {
    "healcore": ["Healer", "start", "Checkpoints", "Logging", "Hooks", "RunStopped"],
    "healcore.torch": ["attach", "heal_trainer", "HealingCallback", "LightningHealingCallback"],
    "healcore.jax": ["protect", "heal", "metrics", "last_decision"],
    "healcore.policy": ["load", "Policy", "Overrides"],
}
"""Public module -> the symbols that most programs need, which come before the others."""
TYPES = {
    "healcore.runtime.healer": ["State"],
    "healcore.runtime.store.store": ["Places", "Root", "Roots"],
    "healcore.runtime.reporting.trackers": ["TrackersLike"],
    "healcore.runtime.run_options": [
        "AttachOptions",
        "TrainerOptions",
        "HealerOptions",
        "EventHook",
        "Hook",
    ],
    "healcore.runtime.run.batches.batch_loop": ["Batch", "Batches"],
    "healcore.runtime.data.loaders": ["Loader"],
    "healcore.runtime.data.positions": ["BatchId"],
    "healcore.runtime.faults.microbatches": ["Microbatch"],
    "healcore.runtime.healing_report": ["HealingReport"],
    "healcore.console": ["Console"],
    "healcore.jax.gradients": ["AxisName"],
    "healcore.jax.trees": ["PyTree"],
    "healcore.core.array_namespace": [
        "ArrayNamespace", "Float", "Int", "Flag", "Number", "Norms",
    ],
}  # fmt: skip
"""Module -> its types that signatures name and that have no page: docs/api/types.md explains them.
"""
ONLY_FOR_THE_DRIVER = "has_loss|has_seen_loss|in_step|discard|judge_dropped|settle"
MARK = "<!-- symbols -->"
"""The place in docs/api/index.md for the tables."""


class Definition(NamedTuple):
    """The place where a symbol is defined."""

    module: str
    name: str

    @property
    def path(self) -> str:
        """The dotted name."""
        return f"{self.module}.{self.name}"


class Symbol(NamedTuple):
    """A public symbol with a page."""

    module: str
    name: str
    definition: Definition

    @property
    def path(self) -> str:
        """The dotted name."""
        return f"{self.module}.{self.name}"

    @property
    def page(self) -> str:
        """The name of the page's file in `api/`."""
        return f"{self.path}.md"


# -- reading the source ----------------------------------------------------------------------------


def _file(module: str) -> Path | None:
    path = ROOT.joinpath(*module.split("."))
    found = (path / "__init__.py", path.with_suffix(".py"))
    return next((each for each in found if each.is_file()), None)


@functools.cache
def _names(module: str) -> dict[str, ast.stmt]:
    """Name -> the statement at the top of a module (or in an `if` there) that binds the name."""
    file = _file(module)
    found: dict[str, ast.stmt] = {}
    left = list(ast.parse(file.read_text()).body) if file else []
    while left:
        node = left.pop(0)
        if isinstance(node, ast.If):
            left = [*node.body, *left]
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            found |= dict.fromkeys(_names(str(node.module)), node)
        elif isinstance(node, ast.ImportFrom):
            found |= {each.asname or each.name: node for each in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            targets = [part for each in targets for part in getattr(each, "elts", [each])]
            found |= {each.id: node for each in targets if isinstance(each, ast.Name)}
    return found


def definition(module: str, name: str) -> Definition | None:
    """Follows imports to the definition of a name. Returns None for a module or a foreign name."""
    node = _names(module).get(name)
    if node is None:
        return None
    if not isinstance(node, ast.ImportFrom):
        return Definition(module, name)
    origin = next((each.name for each in node.names if (each.asname or each.name) == name), name)
    # `from healcore import errors` in healcore itself: a module.
    return None if node.module == module else definition(str(node.module), origin)


def value_of(module: str, name: str) -> str | None:
    """The value of a constant as its source has it: `CHECKPOINTS` is "Checkpoints()"."""
    where = definition(module, name)
    node = _names(where.module).get(where.name) if where else None
    if where is None or not isinstance(node, ast.Assign):
        return None
    value = node.value
    if isinstance(node.targets[0], ast.Tuple) and isinstance(value, ast.Tuple):
        names = [each.id for each in node.targets[0].elts if isinstance(each, ast.Name)]
        value = value.elts[names.index(where.name)]

    def resolved(found: re.Match[str]) -> str:
        return value_of(where.module, found[0]) or found[0]

    return re.sub(r"\b[A-Z][A-Z_]{3,}\b", resolved, ast.unparse(value))


def _public(module: str) -> list[str]:
    if module in MEMBERS:
        return MEMBERS[module]
    names = _names(module)
    listed = names.get("__all__")
    if isinstance(listed, ast.Assign):
        return ast.literal_eval(listed.value)
    kinds = (ast.ClassDef, ast.FunctionDef)
    return [each for each, node in names.items() if isinstance(node, kinds) and each[0] != "_"]


@functools.cache
def symbols() -> tuple[Symbol, ...]:
    """All public symbols except modules and `__version__`, each once, by module.

    Within a module the symbols of `FIRST` come first, and then the others by name.
    """
    found: dict[Definition, Symbol] = {}
    for module in MODULES:
        first = FIRST.get(module, [])
        others = sorted(set(_public(module)) - set(first), key=str.lower)
        for name in [*first, *others]:
            where = None if name.startswith("__") else definition(module, name)
            if where is not None:
                found.setdefault(where, Symbol(module, name, where))
    return tuple(found.values())


def summary(where: Definition) -> str:
    """The first paragraph of a docstring, in one line."""
    node = _names(where.module)[where.name]
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        text = ast.get_docstring(node) or ""
    else:
        body = ast.parse((_file(where.module) or ROOT).read_text()).body
        after = {body[i].lineno: body[i + 1] for i in range(len(body) - 1)}.get(node.lineno)
        value = after.value if isinstance(after, ast.Expr) else None
        text = str(value.value) if isinstance(value, ast.Constant) else ""
    return " ".join(text.split("\n\n")[0].split())


def bases(where: Definition) -> list[Definition | str]:
    """The bases of a class of healcore; a base of Python's own is its name."""
    node = _names(where.module)[where.name]
    found: list[Definition | str] = []
    for base in node.bases if isinstance(node, ast.ClassDef) else []:
        module, _, name = ast.unparse(base).rpartition(".")
        if module:  # `memory.SnapshotStore`: no exception is written like this
            continue
        found.append(definition(where.module, name) or name)
    return found


def is_exception(where: Definition | str) -> bool:
    """Whether this is a class of exceptions."""
    if isinstance(where, str):
        kind = getattr(builtins, where, None)
        return isinstance(kind, type) and issubclass(kind, BaseException)
    return any(is_exception(each) for each in bases(where))


# -- pages -----------------------------------------------------------------------------------------


def page(symbol: Symbol) -> str:
    """The page of a symbol, for mkdocstrings."""
    text = (
        f"::: {symbol.path}\n    options:\n      heading_level: 1\n      show_root_heading: true\n"
    )
    text += "      show_root_full_path: true\n      show_root_toc_entry: true\n"
    if symbol.name == "Healing":
        text += f'      filters: ["!^_", "!^({ONLY_FOR_THE_DRIVER})$"]\n'
    if symbol.name in ("Action", "Cause", "Decision"):
        text += "      show_if_no_docstring: true\n"  # their members
    others = [
        f"`{module}.{symbol.name}`"
        for module in MODULES
        if module != symbol.module
        and symbol.name in _public(module)
        and definition(module, symbol.name) == symbol.definition
    ]
    return text + (f"\nAlso importable as {', '.join(others)}.\n" if others else "")


def tables() -> str:
    """A table of each module's symbols, with links."""
    parts = [f"## {module}\n\n{what}\n\n{_table(module)}" for module, what in MODULES.items()]
    return "\n\n".join(parts)


def _table(module: str) -> str:
    """A table of the symbols of one module."""
    text = "| Symbol | |\n|---|---|"
    for each in symbols():
        if each.module == module:
            text += f"\n| [`{each.name}`]({each.page}) | {_cell(each.definition)} |"
    return text


def exceptions() -> str:
    """The page with the index of exceptions."""
    pages = {each.definition: each for each in symbols()}
    text = (
        "# Index of exceptions\n\n"
        "Every exception derives from [`HealcoreError`](healcore.HealcoreError.md). "
        "`HealcoreError` is a `BaseException`, so `except Exception` does not catch the end of a "
        "run.\n\n| Exception | Is also a | Raised when |\n|---|---|---|\n"
    )
    for symbol in sorted(symbols(), key=lambda each: each.name.lower()):
        if not is_exception(symbol.definition):
            continue
        kinds = []
        for base in bases(symbol.definition):
            target = pages.get(base) if isinstance(base, Definition) else None
            name = base if isinstance(base, str) else base.name
            kinds.append(f"[`{name}`]({target.page})" if target else f"`{name}`")
        what = _cell(symbol.definition)
        text += f"| [`{symbol.name}`]({symbol.page}) | {', '.join(kinds)} | {what} |\n"
    return text


def module_page(module: str) -> str:
    """The page of a module: what it has, and a table of its symbols."""
    return f"# {module}\n\n{MODULES[module]}\n\n{_table(module)}\n"


def types() -> str:
    """The page with the types that signatures name and that have no page of their own."""
    text = (
        "# Types in signatures\n\n"
        "The signatures of the reference name these types. A program passes or receives such "
        "values, but need not import the types.\n\n| Type | Stands for | |\n|---|---|---|\n"
    )
    for module, names in TYPES.items():
        for name in names:
            where = Definition(module, name)
            anchor = f'<a id="{name}"></a>`{name}`'
            text += f"| {anchor} | {_stands_for(where)} | {_cell(where)} |\n"
    return text


def _stands_for(where: Definition) -> str:
    """The value of an alias, or the keys of a TypedDict, or a word for another class or type."""
    node = _names(where.module)[where.name]
    value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
    if value is not None and not isinstance(value, ast.Call):
        # In a table a code span would show the backslash of an escaped bar.
        return f"<code>{html.escape(ast.unparse(value)).replace('|', '&#124;')}</code>"
    if isinstance(node, ast.ClassDef) and where.name.endswith("Options"):
        keys = [
            f"`{each.target.id}`"
            for each in node.body
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
        ]
        parents = [f"those of `{base.id}`" for base in node.bases if isinstance(base, ast.Name)]
        parents = [each for each in parents if "TypedDict" not in each]
        return "a dictionary with any of the keys " + ", ".join([*keys, *parents])
    if isinstance(node, ast.ClassDef):
        return "an object"
    return "any type"


def _cell(where: Definition) -> str:
    return summary(where).replace("|", "\\|")


LINK_TO_JAX = "JAX: [the same change](docs/jax.md#the-whole-change).\n\n"
"""Line of README.md below the change for torch."""
TABS = re.compile(r"<!-- tabs -->\n(.*?)<!-- /tabs -->\n", flags=re.M | re.S)
TAB = re.compile(r"^<!-- (torch|JAX) -->\n", flags=re.M)


def with_tabs(text: str) -> str:
    """A page with its parts for torch and JAX as tabs.

    On GitHub the parts stand one after the other, and their marks are comments:

        <!-- tabs -->
        <!-- torch -->
        ...
        <!-- JAX -->
        ...
        <!-- /tabs -->
    """

    def tabbed(found: re.Match[str]) -> str:
        _, *parts = TAB.split(found[1])
        pairs = zip(parts[::2], parts[1::2], strict=True)
        return "\n".join(f'=== "{name}"\n\n{textwrap.indent(part, "    ")}' for name, part in pairs)

    return TABS.sub(tabbed, text)


DIFF = re.compile(r"^```diff\n.*?^```\n", flags=re.M | re.S)


def _whole_change(file: Path) -> str:
    """The first diff of a page, as its source has it."""
    found = DIFF.search(file.read_text())
    assert found is not None, f"{file} shows no diff"
    return found[0]


def home() -> str:
    """README.md as the first page: its links lead to pages of the site, other links are text.

    README.md shows the whole change for torch. Home has the change for JAX beside it, as a tab.
    """
    text = (ROOT / "README.md").read_text()
    in_torch = _whole_change(ROOT / "README.md")
    in_jax = _whole_change(ROOT / "docs/jax.md")
    tabs = ""
    for name, diff in (("torch", in_torch), ("JAX", in_jax)):
        tabs += f'=== "{name}"\n\n{textwrap.indent(diff, "    ")}\n'
    text = text.replace(in_torch, tabs)
    text = text.replace(LINK_TO_JAX, "")  # Home shows the change for JAX itself
    text = re.sub(r"\[([^]]+)\]\((?!docs/|https?:|#)[^)]+\)", r"\1", text)
    return re.sub(r"""(\]\(|src="|srcset=")docs/""", r"\1", text)


# -- what mkdocs calls -----------------------------------------------------------------------------


def on_config(config: Any) -> Any:
    """Completes `nav`: the symbols below `api/`."""
    for section in config["nav"]:
        for entries in section.values():
            for entry in entries if isinstance(entries, list) else []:
                for title, target in entry.items():
                    if target == "api/":
                        entry[title] = ["api/index.md", {"Exceptions": "api/exceptions.md"}]
                        entry[title].append({"Types in signatures": "api/types.md"})
                        entry[title] += [{module: _nav_of(module)} for module in MODULES]
    return config


def _nav_of(module: str) -> list[dict[str, str]]:
    """The entries of a module in `nav`: the page of the module, and those of its symbols."""
    entries = [{"All names": f"api/{module}.md"}]
    entries += [{each.name: f"api/{each.page}"} for each in symbols() if each.module == module]
    return entries


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages of the API reference."""
    # make docs installs mkdocs; make lint does not.
    from mkdocs.structure.files import File  # pyright: ignore[reportMissingImports]

    made = {each.page: page(each) for each in symbols()}
    made |= {f"{module}.md": module_page(module) for module in MODULES}
    made |= {"exceptions.md": exceptions(), "types.md": types()}
    for name, text in made.items():
        files.append(File.generated(config, f"api/{name}", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Makes Home and the tables of the reference, and takes decisions out of the search."""
    if page.file.src_uri.startswith("decisions/"):
        page.meta["search"] = {"exclude": True}  # a page for developers
    markdown = with_tabs(markdown)
    made = {"index.md": home, "api/index.md": lambda: markdown.replace(MARK, tables())}
    return made.get(page.file.src_uri, lambda: markdown)()


SHIM = "https://unpkg.com/iframe-worker/shim"
"""The plugin `offline` would take this script from another server."""


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Takes the script of the search from the site, and completes the pages of the reference.

    There a page that a docstring names is a link, and so is a type of `TYPES`. A default is a
    value: `Checkpoints()` instead of `CHECKPOINTS`.
    """
    root = "../" * page.url.count("/")
    if page.file.src_uri.startswith("api/"):
        for symbol in symbols():
            if page.file.src_uri == f"api/{symbol.page}":
                module = symbol.definition.module

                def shown(found: re.Match[str], module: str = module) -> str:
                    return f">{value_of(module, found[1]) or found[1]}</span>"

                output = re.sub(r">([A-Z][A-Z_]{3,})</span>", shown, output)
        for module, names in TYPES.items():
            pattern = rf'(<span title="{re.escape(module)}\.)({"|".join(names)})(">)\2</span>'
            output = re.sub(pattern, r'\1\2\3<a href="types.html#\2">\2</a></span>', output)
        output = re.sub(r"\bdocs/([a-z-]+)\.md\b", rf'<a href="{root}\1.html">\1</a>', output)
    return output.replace(SHIM, f"{root}search-frame.js")


def on_post_template(output_content: str, **_: Any) -> str:
    """The same for the page of the error 404."""
    return output_content.replace(SHIM, "/search-frame.js")

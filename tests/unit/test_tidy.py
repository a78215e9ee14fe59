"""Style nobody has to argue about: the rules of the design that a program can check.

A rule takes a source file and yields what is wrong in it. Every rule is also run on a sample that
breaks it, so that a rule which stopped looking is noticed.
"""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
ROOTS = {"tierkv": ".", "tierkv_codecs": "codecs", "tierkv_connectors": "connectors"}
ROOTS |= {"tierkv_service": "service", "bench": "."}

# Who may import whom: a package sees those before it.
LAYERS = ("tierkv", "tierkv_codecs", "tierkv_connectors", "tierkv_service", "bench")
ENGINES = {"torch", "transformers", "vllm", "sglang", "safetensors"}
EXTRAS = ENGINES | {"redis", "hiredis", "zstandard", "fastapi", "prometheus_client", "rich"}
EXTRAS |= {"typer", "uvicorn", "gguf", "sentencepiece", "accelerate", "psutil", "httpx"}

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

BANNED_WORDS = {"manager", "handler", "helper", "util", "common", "misc", "backend", "adapter"}
BANNED_WORDS |= {"chunk"}
BANNED_ENDING = re.compile(r"_v\d+$", re.IGNORECASE)
# Names that an engine's interface fixes for whoever implements it.
FOREIGN_NAMES = {"attn_backend"}

# The three edges where nothing may escape: into a worker loop, a client, an engine.
BROAD_EXCEPT_FILES = {
    "tierkv/executor.py",
    "service/tierkv_service/server.py",
    "connectors/tierkv_connectors/edge.py",
}
# The one place of each package that starts threads.
THREAD_FILES = {
    "tierkv/executor.py",
    "codecs/tierkv_codecs/threads.py",
    "connectors/tierkv_connectors/threads.py",
    "service/tierkv_service/threads.py",
}
THREAD_STARTERS = {"Thread", "Timer", "ThreadPoolExecutor", "start_new_thread", "to_thread"}
PICKLES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}

# Spelled in two halves, so that this file passes its own rules.
BARE_IGNORE = re.compile("# type: " + r"ignore(?!\[[a-z])")
HOME_PATH = re.compile(r"(?<![\w.~-])/" + r"(?:home/\w|root(?![\w-])|Users/\w|work/\w)")
REGISTRY_HOST = re.compile("pypi" + r"\.org|python" + r"hosted\.org|npmjs" + r"\.(?:org|com)")
BARE_INSTALL = re.compile("pip install " + r"[^\n]*\btierkv(?![\w-])")


class Source(NamedTuple):
    """One Python file: its path in the repository, its package, its text and its tree."""

    path: str
    package: str
    text: str
    tree: ast.Module


Rule = Callable[[Source], Iterator[str]]


def read(package: str, root: str) -> Iterator[Source]:
    for path in sorted((REPOSITORY / root / package).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        yield Source(path.relative_to(REPOSITORY).as_posix(), package, text, ast.parse(text))


@cache
def sources() -> tuple[Source, ...]:
    return tuple(source for package, root in ROOTS.items() for source in read(package, root))


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and full name of everything imported, at any depth of the tree."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.lineno, node.module or ""


def direction(source: Source) -> Iterator[str]:
    """Imports point from service to connectors to codecs to core, and nowhere back."""
    allowed = set(LAYERS[: LAYERS.index(source.package) + 1])
    for line, name in imports(source.tree):
        top = name.partition(".")[0]
        if top in LAYERS and top not in allowed:
            yield f"{line}: {source.package} imports {top}, which is above it"
        if top in ENGINES and source.package == "tierkv":
            yield f"{line}: the core imports {top}"
        if top == "tests" and source.package != "bench":  # it may measure with a test's rig
            yield f"{line}: imports tests"


def gpu(source: Source) -> Iterator[str]:
    """CuPy is imported in one place."""
    if source.path != "connectors/tierkv_connectors/device/cuda.py":
        for line, name in imports(source.tree):
            if name.partition(".")[0] == "cupy":
                yield f"{line}: imports {name}"


def length(source: Source) -> Iterator[str]:
    lines = source.text.count("\n")
    if lines > MAX_FILE_LINES:
        yield f"1: {lines} lines, more than {MAX_FILE_LINES}"
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                yield f"{node.lineno}: {node.name} has {lines} lines, over {MAX_FUNCTION_LINES}"


def words(identifier: str) -> set[str]:
    """Split snake and camel case into lower-case words, in the singular."""
    split = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", identifier)
    return {word.lower() for word in split} | {word.lower().removesuffix("s") for word in split}


def defined_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield names that this file gives; attributes of other objects are somebody else's."""
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.lineno, node.name
            case ast.arg():
                yield node.lineno, node.arg
            case ast.Name(ctx=ast.Store()):
                yield node.lineno, node.id
            case ast.Attribute(ctx=ast.Store(), value=ast.Name(id="self" | "cls")):
                yield node.lineno, node.attr
            case ast.alias(asname=str(name)):
                yield node.lineno, name
            case ast.ExceptHandler(name=str(name)):
                yield node.lineno, name


def banned(name: str) -> bool:
    return bool(words(name) & BANNED_WORDS or BANNED_ENDING.search(name))


def names(source: Source) -> Iterator[str]:
    path = Path(source.path)
    for part in (*path.parent.parts, path.stem):
        if banned(part):
            yield f"1: the path has the banned word {part}"
    for line, name in defined_names(source.tree):
        if name not in FOREIGN_NAMES and banned(name):
            yield f"{line}: the name {name} has a banned word"


def last_name(node: ast.expr | None) -> str:
    """Return what a dotted or plain name ends with, or nothing for other expressions."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def broad_except(source: Source) -> Iterator[str]:
    if source.path in BROAD_EXCEPT_FILES:
        return
    broad = {"Exception", "BaseException"}
    for node in ast.walk(source.tree):
        caught: list[ast.expr] = []
        match node:
            case ast.ExceptHandler(type=None):
                yield f"{node.lineno}: bare except"
            case ast.ExceptHandler(type=ast.Tuple(elts=caught)):
                pass
            case ast.ExceptHandler(type=ast.expr() as kind):
                caught = [kind]
            case ast.Call(func=func, args=caught) if last_name(func) == "suppress":
                pass
            case _:
                continue
        if broad & {last_name(kind) for kind in caught}:
            yield f"{node.lineno}: catches everything"


def threads(source: Source) -> Iterator[str]:
    """Threads start in one named place of each package; a benchmark may load it with more."""
    if source.path in THREAD_FILES or source.package == "bench":
        return
    for node in ast.walk(source.tree):
        started: list[ast.expr] = []
        match node:
            case ast.Call(func=func):
                started = [func]
            case ast.ClassDef(bases=bases):
                started = bases
            case _:
                continue
        for name in THREAD_STARTERS & {last_name(part) for part in started}:
            yield f"{node.lineno}: starts a thread with {name}"


def pickles(source: Source) -> Iterator[str]:
    for line, name in imports(source.tree):
        if name.partition(".")[0] in PICKLES:
            yield f"{line}: imports {name}"
    for node in ast.walk(source.tree):
        match node:
            case ast.keyword(
                arg="allow_pickle" | "weights_only" as arg, value=ast.Constant(value=bool(value))
            ) if value == (arg == "allow_pickle"):
                yield f"{node.value.lineno}: {arg}={value} unpickles"


def bare_ignores(source: Source) -> Iterator[str]:
    for number, line in enumerate(source.text.splitlines(), 1):
        if BARE_IGNORE.search(line):
            yield f"{number}: type ignored without a code"


RULES: tuple[Rule, ...] = (
    direction,
    gpu,
    length,
    names,
    broad_except,
    threads,
    pickles,
    bare_ignores,
)

LONG_FUNCTION = "def long() -> None:\n" + "    pass\n" * MAX_FUNCTION_LINES
BROKEN: tuple[tuple[Rule, str], ...] = (
    (direction, "import torch"),
    (direction, "def f():\n    from tierkv_service import cli"),
    (gpu, "def f():\n    import cupy.cuda"),
    (length, "x = 1\n" * (MAX_FILE_LINES + 1)),
    (length, LONG_FUNCTION),
    (names, "class TierManager: pass"),
    (names, "chunks = 1"),
    (names, "import numpy as io_backend"),
    (names, "def f(error_handler): pass"),
    (names, "def encode_v2(): pass"),
    (broad_except, "try:\n    f()\nexcept:\n    pass"),
    (broad_except, "try:\n    f()\nexcept (OSError, Exception):\n    pass"),
    (broad_except, "with contextlib.suppress(BaseException):\n    f()"),
    (threads, "threading.Thread(target=f)"),
    (threads, "class Pump(Thread): pass"),
    (pickles, "import pickle"),
    (pickles, "np.load(f, allow_pickle=True)"),
    (pickles, "torch.load(f, weights_only=False)"),
    (bare_ignores, "x = f()  # type: " + "ignore"),
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_packages_keep(rule: Rule) -> None:
    wrong = [f"{source.path}:{line}" for source in sources() for line in rule(source)]
    assert not wrong, "\n" + "\n".join(wrong)


@pytest.mark.parametrize(("rule", "text"), BROKEN, ids=lambda value: getattr(value, "__name__", ""))
def test_rule_notices(rule: Rule, text: str) -> None:
    assert list(rule(Source("tierkv/sample.py", "tierkv", text, ast.parse(text))))


def test_tests_are_short_too() -> None:
    wrong = [f"{source.path}:{line}" for source in read("tests", ".") for line in length(source)]
    assert not wrong, "\n" + "\n".join(wrong)


def test_foreign_attributes_may_have_any_name() -> None:
    text = "self.gather(x.backend, torch.backends.cuda)\nlogger.handlers = []"
    assert not list(names(Source("tierkv/sample.py", "tierkv", text, ast.parse(text))))


def test_every_package_is_looked_at() -> None:
    assert {source.package for source in sources()} == set(LAYERS)


def run_isolated(blocked: set[str], body: str) -> str:
    """Run Python with imports of `blocked` refused; return what is loaded of them, or the error."""
    program = f"""
import importlib, pkgutil, sys
blocked = {blocked!r}
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"{{name}} is blocked", name=name)
sys.meta_path.insert(0, Refuse())
{body}
"""
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    return done.stderr


def test_core_imports_without_extras() -> None:
    assert run_isolated(EXTRAS, "import tierkv") == ""


def test_core_imports_without_engines() -> None:
    body = """
import tierkv
for module in pkgutil.walk_packages(tierkv.__path__, "tierkv."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
"""
    assert run_isolated(ENGINES, body) == ""


@cache
def texts() -> tuple[tuple[str, str], ...]:
    """Return path and text of every text file of the repository, what is generated left out."""
    generated = {"__pycache__", "build", "dist"}
    suffixes = {".py", ".md", ".toml", ".sh", ".yaml", ".yml", ".json", ".html", ".js", ".css", ""}
    found = []
    for folder, folders, files in os.walk(REPOSITORY):
        folders[:] = [
            name
            for name in folders
            if name == ".ci" or not (name in generated or name.startswith((".", "tierkv_sidecar.")))
        ]
        for path in (Path(folder) / name for name in files):
            if path.suffix in suffixes and path.is_file() and path.name != ".git":
                text = path.read_text(encoding="utf-8", errors="replace")
                found.append((path.relative_to(REPOSITORY).as_posix(), text))
    return tuple(found)


@pytest.mark.parametrize("pattern", [HOME_PATH, REGISTRY_HOST], ids=["home path", "registry host"])
def test_files_name_no_machine(pattern: re.Pattern[str]) -> None:
    wrong = [
        f"{path}:{number}: {found.group()}"
        for path, text in texts()
        for number, line in enumerate(text.splitlines(), 1)
        if (found := pattern.search(line))
    ]
    assert not wrong, "\n" + "\n".join(wrong)


def test_documents_install_the_right_distribution() -> None:
    """The name tierkv is somebody else's on the package index."""
    wrong = [path for path, text in texts() if path.endswith(".md") and BARE_INSTALL.search(text)]
    assert not wrong
    assert BARE_INSTALL.search("pip install " + "tierkv[redis]")
    assert not BARE_INSTALL.search("pip install " + "tierkv-sidecar[redis]")


def test_bare_ignores_are_not_in_tests_either() -> None:
    for path in sorted((REPOSITORY / "tests").rglob("*.py")):
        source = Source(path.name, "tests", path.read_text(encoding="utf-8"), ast.Module([], []))
        assert not list(bare_ignores(source)), path

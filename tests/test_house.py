"""The rules of the house that no tool knows: budgets, names, documentation, what never happens, what a test is."""

from __future__ import annotations

import ast
import functools
import io
import re
import statistics
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from anyshard import errors, options

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "anyshard"
LONG = "# long because"
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Source:
    """One file of Python, parsed."""

    path: Path
    text: str
    tree: ast.Module

    def at(self, line: int, what: str) -> str:
        """A finding, as an editor can jump to it."""
        return f"{self.path.relative_to(ROOT)}:{line}: {what}"

    def functions(self) -> Iterator[Function]:
        """All functions and methods with a body of their own (a protocol's `...` is none)."""
        for node in ast.walk(self.tree):
            if isinstance(node, Function) and body_of(node):
                yield node


@functools.cache
def read_sources(folder: Path) -> tuple[Source, ...]:
    """All Python files below `folder`."""
    texts = [(path, path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.py"))]
    return tuple(Source(path, text, ast.parse(text)) for path, text in texts)


def read_all() -> list[Source]:
    """All Python files that people read: the package and everything beside it."""
    folders = (SRC, ROOT / "tests", ROOT / "examples", ROOT / "scripts", ROOT / "benchmarks")
    return [source for folder in folders for source in read_sources(folder)]


def body_of(function: Function) -> list[ast.stmt]:
    """The statements of a function without its docstring and without a lone `...`."""
    body = function.body[1:] if ast.get_docstring(function, clean=False) is not None else function.body
    lone = len(body) == 1 and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
    return [] if lone else body


def num_lines(function: Function) -> int:
    """Lines of a function's body."""
    return (function.end_lineno or 0) - body_of(function)[0].lineno + 1


def is_public(name: str) -> bool:
    """Whether a name is part of the surface."""
    return not name.startswith("_")


def find_calls(node: ast.AST, names: tuple[str, ...]) -> Iterator[ast.Call]:
    """All calls below a node of one of the dotted `names`."""
    return (call for call in ast.walk(node) if isinstance(call, ast.Call) and ast.unparse(call.func) in names)


def find(check: Callable[[Source], Iterator[str]], sources: tuple[Source, ...] | list[Source]) -> list[str]:
    """All findings of a check."""
    return [finding for source in sources for finding in check(source)]


# Budgets ---------------------------------------------------------------------------------------------------------------


def test_functions_are_short() -> None:
    """Half of all function bodies have at most 8 lines, 95 of 100 at most 40."""
    lengths = sorted(num_lines(function) for source in read_sources(SRC) for function in source.functions())
    assert statistics.median(lengths) <= 8
    assert lengths[len(lengths) * 95 // 100] <= 40


def test_no_function_is_long_without_a_reason() -> None:
    """A function body of more than 60 lines says why in a comment."""

    def check(source: Source) -> Iterator[str]:
        lines = source.text.splitlines()
        for function in source.functions():
            if num_lines(function) > 60 and LONG not in "\n".join(lines[function.lineno - 1 : function.end_lineno]):
                yield source.at(function.lineno, f"{function.name} has {num_lines(function)} lines")

    assert [] == find(check, read_sources(SRC))


def test_files_are_short() -> None:
    """No file has more than 600 lines, and one of more than 400 says why."""

    def check(source: Source) -> Iterator[str]:
        num = source.text.count("\n")
        if num > 600 or (num > 400 and LONG not in source.text):
            yield source.at(1, f"{num} lines")

    assert [] == find(check, read_sources(SRC))


def test_optional_parameters_are_named() -> None:
    """Behind the first two parameters of a public function, those with a default can only be given by name."""

    def check(source: Source) -> Iterator[str]:
        for function in source.functions():
            positional = function.args.posonlyargs + function.args.args
            first = 1 if positional and positional[0].arg in ("self", "cls") else 0
            optional = positional[len(positional) - len(function.args.defaults) :]
            if is_public(function.name) and set(optional) - set(positional[: first + 2]):
                yield source.at(function.lineno, f"{function.name}: put a * before {optional[0].arg}")

    assert [] == find(check, read_sources(SRC))


def test_suppressions_have_a_reason() -> None:
    """A `noqa` names its rules and says why it is right not to follow them."""
    well_formed = re.compile(r"# noqa: [A-Z]+[0-9]+(, ?[A-Z]+[0-9]+)*\W+\w.{8,}")

    def check(source: Source) -> Iterator[str]:
        for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
            suppresses = token.type == tokenize.COMMENT and "noqa" in token.string
            if suppresses and not well_formed.match(token.string):
                yield source.at(token.start[0], token.string)

    assert [] == find(check, read_sources(SRC))


# Names and documentation -----------------------------------------------------------------------------------------------


def test_no_file_is_a_grab_bag() -> None:
    """A file is named after its concern."""
    names = {"utils", "util", "common", "misc", "helpers", "base", "types"}
    assert [] == [source.path for source in read_all() if source.path.stem in names]


def test_code_is_ascii() -> None:
    """Code holds ASCII only."""
    assert [] == [source.path for source in read_all() if not source.text.isascii()]


def test_annotations_are_lazy() -> None:
    """Every file that defines something has the future import, so that an annotation costs nothing at run time."""
    line = "from __future__ import annotations"
    defining = [
        source for source in read_sources(SRC) if any(isinstance(node, Function | ast.ClassDef) for node in source.tree.body)
    ]
    assert [] == [source.path for source in defining if line not in source.text]


def find_protocol_methods() -> set[str]:
    """Names of all methods that a protocol of the package documents."""
    classes = [node for source in read_sources(SRC) for node in ast.walk(source.tree) if isinstance(node, ast.ClassDef)]
    protocols = [node for node in classes if any("Protocol" in ast.unparse(base) for base in node.bases)]
    return {item.name for node in protocols for item in node.body if isinstance(item, Function) and ast.get_docstring(item)}


def find_undocumented(node: ast.Module | ast.ClassDef, *, documented: set[str]) -> Iterator[tuple[int, str]]:
    """Public classes, functions and methods without a docstring, but methods that implement a protocol."""
    for item in node.body:
        if not isinstance(item, Function | ast.ClassDef) or not is_public(item.name):
            continue
        decorators = [ast.unparse(decorator) for decorator in item.decorator_list]
        exempt = isinstance(node, ast.ClassDef) and item.name in documented
        exempt = exempt or "overload" in decorators or f"{item.name}.setter" in decorators
        if ast.get_docstring(item) is None and not exempt:
            yield item.lineno, item.name
        if isinstance(item, ast.ClassDef):
            yield from find_undocumented(item, documented=documented)


def test_public_names_are_documented() -> None:
    """Every module, and every public class, function and method has a docstring (a protocol speaks for its methods)."""
    documented = find_protocol_methods()

    def check(source: Source) -> Iterator[str]:
        if ast.get_docstring(source.tree) is None:
            yield source.at(1, "module")
        for line, name in find_undocumented(source.tree, documented=documented):
            yield source.at(line, name)

    assert [] == find(check, read_sources(SRC))


# What never happens ----------------------------------------------------------------------------------------------------


def test_the_library_neither_prints_nor_exits() -> None:
    """No print and no exit; faces for people (cli) may."""
    names = ("print", "exit", "quit", "sys.exit", "os._exit")

    def check(source: Source) -> Iterator[str]:
        if "cli" not in source.path.relative_to(SRC).parts:
            yield from (source.at(call.lineno, "speaks or exits") for call in find_calls(source.tree, names))

    assert [] == find(check, read_sources(SRC))


def test_no_module_has_mutable_state() -> None:
    """A list, dict or set at module level is a constant, and is named like one."""
    makers = ("list", "dict", "set", "defaultdict", "deque", "Counter", "OrderedDict")
    displays = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)

    def check(source: Source) -> Iterator[str]:
        for node in source.tree.body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                name = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
                made = isinstance(node.value, displays) or any(call is node.value for call in find_calls(node.value, makers))
                if made and not name.isupper() and name != "__all__":
                    yield source.at(node.lineno, name)

    assert [] == find(check, read_sources(SRC))


def test_the_table_of_environment_variables_is_complete() -> None:
    """Every variable that is read stands in the table of options.py, and every variable of the table is read."""
    access = re.compile(r"\bos\.(?:environ|getenv)\b(?:\.get\(|\[|\()?(?:\"(\w+)\")?")
    read = {name for source in read_sources(SRC) for name in access.findall(source.text)}
    assert set(options.ENVIRONMENT) == read


def test_all_errors_are_in_the_error_tree() -> None:
    """Only errors.py defines errors, so the public names have all of them."""
    raised = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, errors.AnyshardError)}

    def check(source: Source) -> Iterator[str]:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef) and raised & {ast.unparse(base) for base in node.bases}:
                yield source.at(node.lineno, node.name)

    assert [] == find(check, [source for source in read_sources(SRC) if source.path.name != "errors.py"])


def find_imports(source: Source) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything that a file imports (`from a import b` is `a.b`)."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def test_nothing_that_runs_code_is_imported() -> None:
    """No pickle and nothing like it, but where foreign checkpoints are read."""
    modules = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "imp", "pydoc"}

    def check(source: Source) -> Iterator[str]:
        if "formats" not in source.path.relative_to(SRC).parts:
            yield from (source.at(line, name) for line, name in find_imports(source) if name.partition(".")[0] in modules)

    assert [] == find(check, read_sources(SRC))


def test_private_names_of_torch_are_in_one_file() -> None:
    """What torch may change without a word is used in one place, where it can be tested and replaced."""
    private = re.compile(r"\btorch(\.\w+)*\._[a-z]\w*")
    users = {
        source.path.name
        for source in read_sources(SRC)
        if private.search(source.text) or any(private.fullmatch(name) for _, name in find_imports(source))
    }
    assert len(users) <= 1, users


def test_rooms_do_not_import_through_the_package_root() -> None:
    """A room imports another by its own name, or the direction of imports could not be checked."""
    modules = {"__version__"} | {path.stem for path in SRC.iterdir()}

    def check(source: Source) -> Iterator[str]:
        for line, name in find_imports(source):
            if name == "anyshard" or (name.startswith("anyshard.") and name.split(".")[1] not in modules):
                yield source.at(line, name)

    assert [] == find(check, read_sources(SRC))


# Tests -----------------------------------------------------------------------------------------------------------------


def find_tests() -> Iterator[tuple[Source, Function]]:
    """All test functions, those of shipped contracts too."""
    for source in (*read_sources(ROOT / "tests"), *read_sources(SRC / "testing")):
        yield from ((source, function) for function in source.functions() if function.name.startswith("test_"))


def claims_something(test: Function) -> bool:
    """Whether a test can fail by itself: an assert, an expected error, or a helper called assert_ or check_ something."""
    for node in ast.walk(test):
        if isinstance(node, ast.Assert):
            return True
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in ("pytest.raises", "pytest.fail") or name.rpartition(".")[2].lstrip("_").startswith(("assert_", "check_")):
                return True
    return False


def test_every_test_says_what_it_claims_and_claims_it() -> None:
    """Each test has a docstring and an assertion."""
    silent = [source.at(test.lineno, test.name) for source, test in find_tests() if not ast.get_docstring(test)]
    toothless = [source.at(test.lineno, test.name) for source, test in find_tests() if not claims_something(test)]
    assert ([], []) == (silent, toothless)


def test_no_test_sleeps() -> None:
    """A test waits for events, never for time."""

    def check(source: Source) -> Iterator[str]:
        yield from (source.at(call.lineno, "sleeps") for call in find_calls(source.tree, ("time.sleep", "sleep")))

    assert [] == find(check, read_sources(ROOT / "tests"))

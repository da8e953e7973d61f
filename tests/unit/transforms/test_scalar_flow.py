"""Which `.item()` calls may be deferred, decided from source."""

from __future__ import annotations

import ast
import textwrap

import pytest

from advisor.transforms.meters import safe_update
from advisor.transforms.scalar_flow import analyse
from advisor.transforms.source import resolving, scope_of


def flow(source: str, line: int = 0, **known: object):
    tree = ast.parse(textwrap.dedent(source))
    scope = tree.body[0] if isinstance(tree.body[0], ast.FunctionDef) else tree
    return analyse(scope, resolving(known), line=line)


ACCEPTED = {
    "accumulated, divided and returned": """
        def f(loader):
            total = 0.0
            for loss in loader:
                total += loss.item()  # site
            return total / len(loader)
        """,
    "weighted": """
        def f(loader):
            total = 0.0
            for x, loss in loader:
                total += loss.item() * x.size(0)  # site
            print(f"loss {total:.3f}")
        """,
    "through a local": """
        def f(loader):
            total = 0
            for i, loss in enumerate(loader):
                value = loss.item()  # site
                total = total + value
                if i % 10 == 0:
                    print("loss: %.3f (%d)" % (total / 10, value), "{:.3f}".format(value))
                    total = 0.0
        """,
    "a count": """
        def f(loader):
            correct = 0
            for out, y in loader:
                correct += (out.argmax(1) == y).sum().item()  # site
            acc = 100.0 * correct / len(loader)
            return acc
        """,
    "a script without functions": """
        total = 0.0
        for loss in loader:
            total += loss.item()  # site
        print(total / 10)
        """,
    "over several lines": """
        def f(loader):
            total = 0.0
            for loss in loader:
                total += (
                    loss.item()  # site
                    * 2
                )
            return total * 1.0
        """,
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(name: str) -> None:
    source = textwrap.dedent(ACCEPTED[name])
    line = next(i for i, text in enumerate(source.splitlines(), 1) if "# site" in text)
    result = flow(source)
    assert result.refused == {}
    assert result.sites == {line}
    assert line in result.lazy


REFUSED = {
    "returned bare": ("total = 0\n    total += x.item()\n    return total", "leaves the function"),
    "returned at once": ("return x.item()", "needed at once"),
    "appended": ("log.append(x.item())", "needed at once"),
    "appended later": ("v = x.item()\n    log.append(v)", "leaves the function"),
    "stored": ("self.loss = x.item()", "needed at once"),
    "stored later": ("v = x.item()\n    d['loss'] = v", "leaves the function"),
    "passed on": ("v = x.item()\n    math.isfinite(v)", "leaves the function"),
    "keyword of an unknown call": ("v = x.item()\n    bar.set_postfix(loss=v)", "leaves the function"),
    "passed through another name": ("v = x.item()\n    w = v\n    return w", "leaves the function"),
    "in a tuple": ("v = x.item()\n    return v, 1", "leaves the function"),
    "captured": ("v = 0\n    v += x.item()\n    g = lambda: v", "another scope"),
    "in a comprehension": ("v = 0\n    v += x.item()\n    w = [v for _ in y]", "another scope"),
    "global": ("global v\n    v = x.item()", "another scope"),
    "yielded": ("v = x.item()\n    yield v", "leaves the function"),
    "inside a call": ("v = math.exp(x.item())", "needed at once"),
    "printed": ("print(x.item())", "needed at once"),
    "same line": ("v = 0; v += x.item()", "shares its line"),
    "one-line loop": ("for x in y: v += x.item()", "shares its line"),
    "spied on": ("v = 0\n    v += x.item()\n    log(locals())", "looks at its own variables"),
    "two targets": ("v = w = x.item()", "needed at once"),
    "walrus": ("if (v := x.item()) > 1:\n        pass", "needed at once"),
    "subscript": ("v = x.item()\n    return table[v]", "leaves the function"),
    "starred": ("v = x.item()\n    print(*v)", "leaves the function"),
    "asked whether it is True": ("v = x.item()\n    while v is True:\n        pass", "asked what it is"),
    "asked whether it is not another": ("v = 0\n    v += x.item()\n    log(0 < d is not v)", "asked what it is"),
    "told by a failed assertion": ("v = x.item()\n    assert y, v", "leaves the function"),
    "unknown meter": ("meter.update(x.item())", "meter is not known"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    body, reason = REFUSED[name]
    result = flow("def f(x, y, log, d, self, math, bar, table, meter):\n    " + body)
    assert result.sites == set()
    assert all(reason in why for why in result.refused.values()), result.refused
    assert result.refused


def test_a_result_that_leaves_is_made_plain_where_it_is_computed() -> None:
    result = flow("""
        def f(loader, history):
            total = 0.0
            for loss in loader:
                total += loss.item()
            mean = total / len(loader)
            history.append(mean)
            return mean
        """)
    assert result.sites == {5}
    assert result.lazy == {5}  # not the line of `mean`


@pytest.mark.parametrize("statement", ["total = total + f(total * 2)", "total += x.item() + f(total * 2)"])
def test_arithmetic_beside_what_is_passed_on_is_done_at_once(statement: str) -> None:
    result = flow(
        f"def g(x):\n    total = 0\n    total += x.item()\n    {statement}\n    if total * 2 is None:\n        total -= 1"
    )
    assert result.refused == {}
    assert result.lazy == {3}


def test_none_is_what_no_number_is() -> None:
    result = flow(
        "def f(x):\n    best = None\n    best = x.item()\n    if best is None or None is not best:\n        pass"
    )
    assert result.sites == {3}


def test_module_names_read_by_functions_stay_plain() -> None:
    result = flow("""
        total = 0.0
        def report():
            return total
        for loss in loader:
            total += loss.item()
        """)
    assert result.sites == set()
    result = flow("""
        total = 0.0
        def report(total):
            return total
        for loss in loader:
            total += loss.item()
        """)
    assert result.sites == {6}


METER = """
class Meter:
    def update(self, val, n=1):
        "Add."
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count
"""


def method(source: str) -> ast.FunctionDef:
    return ast.parse(source).body[0].body[0]


def test_meters() -> None:
    assert safe_update(method(METER), 1) == ""
    for body in ("self.log.append(val)", "self.val = float(val)", "print(val)", "other.val = val", "self.v = [val]"):
        assert "more than arithmetic" in safe_update(method(f"class M:\n  def update(self, val):\n    {body}"), 1)
    assert safe_update(method("class M:\n  def update(self, *val):\n    pass"), 1)
    assert safe_update(method("class M:\n  def update(self):\n    pass"), 1)


def test_the_tree_is_that_of_the_running_code(tmp_path) -> None:
    file = tmp_path / "script.py"
    file.write_text("import functools\n\n@functools.cache\ndef f(x):\n    return x\n")
    space: dict = {}
    exec(compile(file.read_text(), str(file), "exec"), space)
    code = space["f"].__wrapped__.__code__
    assert scope_of(code).name == "f"
    scope_of.cache_clear()
    file.write_text("import functools\n\n@functools.cache\ndef f(x):\n    return x + 1\n")  # edited since
    assert scope_of(code) is None
    scope_of.cache_clear()
    file.unlink()
    assert scope_of(code) is None

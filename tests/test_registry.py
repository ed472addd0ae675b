"""Naming a thing and its options: what is written is what is called, and nothing else is
ever run.
"""

import math
import sys
import types

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcover.errors import InvalidValue
from fedcover.registry import Spec, look_up, options_of, parse

literals = st.recursive(
    st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\x00")),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
names = st.from_regex(r"[a-z][a-z_0-9]{0,5}", fullmatch=True)


def written(value):
    """A literal as a user of TOML writes it: booleans in small letters."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(written, value))}]"
    return repr(value)


def window(view, *, spread=False, share: float = 0.5, at: list[int] | None = None):
    return view, spread, share, at


def needs(view, *, limit: int):
    return view, limit


TABLE = {"window": window, "needs": needs}


@settings(max_examples=150)
@given(names, st.dictionaries(names.map(lambda n: f"o_{n}"), literals, max_size=3))
def test_spec_text_is_parsed_as_written(name, options):
    text = f"{name}({', '.join(f'{key}={written(value)}' for key, value in options.items())})"
    result = parse("policy", f"  {text} ")
    assert result == Spec(name, options)
    assert [type(v) for v in result.options.values()] == [type(v) for v in options.values()]


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("f(x=-3)", {"x": -3}),
        ("f(x=-0.5)", {"x": -0.5}),
        ("f(x=(3, 8, 8))", {"x": (3, 8, 8)}),
        ("f(x=[[1, 2], []])", {"x": [[1, 2], []]}),
        ("f(x=true, y=False)", {"x": True, "y": False}),
        ("f(x=[true, [false]])", {"x": [True, [False]]}),
        ("f(x='a (b), c=1')", {"x": "a (b), c=1"}),
        ("f(x=None)", {"x": None}),
        ("f()", {}),
        ("f(over=clients)", {"over": "clients"}),
    ],
)
def test_spec_literals_of_every_kind(text, options):
    assert parse("policy", text) == Spec("f", options)


HOSTILE = [
    "f(",
    "f(1)",
    "f(x)",
    "f(x=)",
    "f(x=1",
    "f(x=1))",
    "f(x=1)(y=2)",
    "f(x=1)+g(y=2)",
    "f(x=1) g",
    "f(x=1); g()",
    "f(*[1])",
    "f(**{'x': 1})",
    "f(x=1, x=2)",
    "f(x=__import__('os').getcwd())",
    "f(x=open('a'))",
    "f(x=1 + 1)",
    "f(x=2**99999999)",
    "f(x='a'*10**9)",
    "f(x=lambda: 1)",
    "f(x=f'{1}')",
    "f(x=-true)",
    "f(x={1: 2})",
    "f(x={[]: 1})",
    "f(x={{}})",
    "f(x=b'a')",
    "f(x=1j)",
    "f(x=...)",
    "f(x=[i for i in 'ab'])",
    "f(x:=1)",
    "f(x=1#)",
    "f(\x00)",
    "f(x='\ud800')",
    "f(x=" + "(" * 500 + ")" * 500 + ")",
    "f(x=" + "-" * 50_000 + "1)",
    "f(x=" + "[" * 90 + "1" + "]" * 91 + ")",
    "f(x=" + "9" * 5000 + ")",
    "f(x=1if 1else 2)",
    "f(x=1 is 1)",
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_spec_text_is_refused_in_one_line(text):
    with pytest.raises(
        InvalidValue, match=r"^policy must look like name or name\(option=value"
    ) as exc_info:
        parse("policy", text)
    assert "\n" not in str(exc_info.value)


@settings(max_examples=300)
@given(
    st.text(max_size=30)
    | st.text("fx()[]{}=,'\"-1.*#:+ \n\\", max_size=20).map(lambda inside: f"f({inside})")
)
def test_any_text_is_a_spec_or_refused(text):
    try:
        result = parse("policy", text)
    except InvalidValue:
        return
    assert isinstance(result, Spec)
    assert result.name == text.strip().partition("(")[0].strip()


def test_spec_options_are_bound():
    assert look_up("policy", parse("policy", "window(spread=true, at=[1, 2])"), TABLE)("v") == (
        "v",
        True,
        0.5,
        [1, 2],
    )
    assert look_up("policy", Spec("window"), TABLE)("v") == ("v", False, 0.5, None)


def test_unknown_names_list_the_known_ones():
    with pytest.raises(
        InvalidValue,
        match=r"^policy must be one of needs, window, package.module:function; "
        r"got 'windo' \(did you mean 'window'",
    ):
        look_up("policy", Spec("windo"), TABLE)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "window(spred=true)",
            "policy window has no option 'spred'; its options are: spread, share, at",
        ),
        (
            "window(view=1)",
            "policy window has no option 'view'; its options are: spread, share, at",
        ),
        ("needs", "policy needs needs the option 'limit': needs(limit=...)"),
        ("needs(limit='two')", "policy needs: limit: input should be a valid integer.*got 'two'"),
        ("needs(limit=[2])", r"policy needs: limit: input should be a valid integer.*got \[2\]"),
        ("window(share='x')", "policy window: share: input should be a valid number.*got 'x'"),
        ("window(at=5)", "policy window: at: input should be a valid list.*got 5"),
    ],
)
def test_wrong_spec_options_are_named(text, message):
    with pytest.raises(InvalidValue, match=f"^{message.replace('(', '[(]').replace(')', '[)]')}$"):
        look_up("policy", parse("policy", text), TABLE)


def test_error_says_that_a_function_has_no_options():
    with pytest.raises(InvalidValue, match=r"its options are: none"):
        look_up("policy", Spec("plain", {"x": 1}), {"plain": lambda view: view})


def test_options_of_unknown_types_are_passed_on():
    class Odd:
        pass

    def odd(*, x: Odd):
        return x

    def quoted(*, x: "no.such.type"):  # noqa: F821
        return x

    assert look_up("policy", Spec("odd", {"x": 3}), {"odd": odd})() == 3
    assert look_up("policy", Spec("quoted", {"x": "3"}), {"quoted": quoted})() == "3"


def test_only_keywords_are_options():
    assert list(options_of(window)) == ["spread", "share", "at"]


@pytest.fixture
def own_module(monkeypatch):
    module = types.ModuleType("own_things")
    module.build, module.number, module.nothing = needs, 5, lambda *, width=3: width
    monkeypatch.setitem(sys.modules, "own_things", module)


@pytest.mark.usefixtures("own_module")
def test_functions_are_imported_by_their_path():
    assert look_up("policy", parse("policy", "own_things:build(limit=3)"), {})("v") == ("v", 3)
    assert look_up("policy", Spec("math:sqrt"), {})(4) == math.sqrt(4)


@pytest.mark.usefixtures("own_module")
@pytest.mark.parametrize(
    ("path", "message"),
    [
        (
            "no_such_module:f",
            "^policy 'no_such_module:f' cannot be imported: No module named 'no_such_module'$",
        ),
        ("own_things:f", "^policy 'own_things:f' cannot be imported: .*no attribute 'f'$"),
        ("own_things:number", "^policy 'own_things:number' must be a function; it is a int$"),
        ("builtins:dict", "^policy 'builtins:dict' must be a Python function"),
        ("own_things:build", "needs the option 'limit'"),
        (
            "own_things:nothing",
            (
                r"^policy 'own_things:nothing' must take the positional "
                r"arguments \(view\), and options"
            ),
        ),
        (":f", "^policy must look like package.module:function; got ':f'$"),
        ("own_things:", "^policy must look like package.module:function; got 'own_things:'$"),
        (".own:f", "^policy must look like package.module:function"),
        ("a..b:f", "^policy must look like package.module:function"),
        ("a:b:c", "^policy must look like package.module:function"),
        ("\x00:f", "^policy must look like package.module:function"),
    ],
)
def test_function_paths_that_lead_nowhere_are_refused(path, message):
    with pytest.raises(InvalidValue, match=message):
        look_up("policy", Spec(path), {})


@pytest.mark.usefixtures("own_module")
def test_function_with_wrong_arguments_is_refused():
    with pytest.raises(
        InvalidValue, match=r"^model .* positional arguments \(shape, classes, norm\), and"
    ):
        look_up("model", Spec("own_things:nothing"), {})
    with pytest.raises(
        InvalidValue, match=r"^recipe .* must take no positional argument, only options behind a \*"
    ):
        look_up("recipe", Spec("own_things:build"), {})


@pytest.mark.parametrize(
    ("field", "path"),
    [
        ("policy", "fedcover.policies.windows:prefix"),
        ("recipe", "fedcover.recipes:plain"),
        ("recipe", "fedcover.recipes.plain:prox"),
        ("model", "fedcover.models.dense:mlp"),
        ("rule", "fedcover.aggregation:median"),
        ("server", "fedcover.aggregation:server_adam"),
        ("partition", "fedcover.partition:iid"),
        ("schedule", "fedcover.training:cosine"),
    ],
)
def test_moved_function_paths_are_still_found(field, path):
    assert look_up(field, parse(field, path), {}).func.__name__ == path.rpartition(":")[2]

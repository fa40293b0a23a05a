"""Policy: parsing, refusals and canonical text of every term; JSON and pickle round trips."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_ft import Policy
from ckpt_ft.errors import UserError

scopes = st.one_of(
    st.sampled_from(["none", "full", "sqrt", "stages"]).map(lambda scope: {"scope": scope}),
    st.tuples(st.sampled_from(["every", "first", "segments"]), st.integers(1, 99)).map(
        lambda pair: {"scope": pair[0], "n": pair[1]}
    ),
    st.sets(st.integers(1, 30), min_size=1).map(
        lambda stages: {"scope": "stages", "members": tuple(map(str, stages))}
    ),
    st.sets(st.sampled_from(["attention", "mlp"]), min_size=1).map(
        lambda members: {"scope": "modules", "members": tuple(members)}
    ),
)
groups = st.sets(
    st.sampled_from(["attention", "matmul", "conv", "router", "aten.bmm", "aten.bmm.default", "flash_attn.forward"])
)


@st.composite
def parts(draw: st.DrawFn) -> dict[str, Any]:
    """Draws the fields that a tower may have."""
    fields = draw(scopes)
    save = draw(groups) if fields["scope"] != "none" else set()
    if "matmul" not in save and fields["scope"] != "none" and draw(st.booleans()):
        save = save | {f"matmul/{draw(st.integers(2, 9))}"}
    return {**fields, "save": tuple(save), "pointwise": draw(st.booleans())}


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    if draw(st.booleans()) and draw(st.booleans()):
        return Policy(auto=True)
    fields = draw(parts())
    flags = {name: draw(st.booleans()) for name in ("offload", "head")}
    by_name = draw(st.dictionaries(st.sampled_from(["language", "vision", "audio"]), parts()))
    towers = tuple((name, Policy(**part)) for name, part in by_name.items())
    plain = fields["scope"] == "none" and not fields["pointwise"] and not flags["offload"] and not towers
    budget = draw(st.none() | st.floats(0, 1)) if plain else None
    return Policy(**fields, **flags, budget=budget, towers=towers)


@given(policies())
def test_round_trips(policy: Policy) -> None:
    assert Policy.parse(str(policy)) == policy
    assert Policy.parse(json.loads(json.dumps(policy.to_dict()))) == policy
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert str(Policy.parse(str(policy))) == str(policy)


@given(policies(), st.randoms())
def test_order_of_terms_does_not_matter(policy: Policy, random: object) -> None:
    terms = str(policy).split(",")
    random.shuffle(terms)  # type: ignore[attr-defined]
    assert Policy.parse(" , ".join(terms)) == policy


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("per_block", "full"),
        ("per_stage", "stages"),
        ("aggressive", "stages:3+4"),
        ("save:matmul+attention", "save:attention+matmul"),
        ("full,save:attention", "save:attention"),
        ("save:attention,save:conv", "save:attention+conv"),
        ("modules:mlp,modules:attention", "modules:attention+mlp"),
        ("stages:10+3", "stages:3+10"),
        ("head,pointwise,every:2", "every:2,pointwise,head"),
        ("stages:03+3", "stages:3"),
        ("budget:0.50", "budget:0.5"),
        ("budget:1", "budget:1"),
        ("budget:0.1234567", "budget:0.1234567"),
        ("pointwise@vision,full@language", "full@language,pointwise@vision"),
        ("per_block@vision,head,save:matmul@language", "save:matmul@language,full@vision,head"),
        ("full,save:attention@language", "full,save:attention@language"),
        ("none@vision,full@language", "full@language"),
        ("full,none@vision", "full,none@vision"),
        ("none@vision", "none"),
        ("first:2@audio,pointwise@audio,pointwise", "pointwise,first:2@audio,pointwise@audio"),
    ],
)
def test_canonical_form(text: str, canonical: str) -> None:
    assert str(Policy.parse(text)) == canonical


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ful", "did you mean 'full'"),
        ("save:atention", "did you mean 'attention'"),
        ("modules:atention", "did you mean 'attention'"),
        ("full,every:2", "full and every contradict each other"),
        ("every:2,every:3", "'every:2' and 'every:3' contradict"),
        ("stages,stages:3", "'stages' and 'stages:3' contradict"),
        ("per_stage,aggressive", "'stages' and 'stages:3+4' contradict"),
        ("auto,full", "give it alone"),
        ("auto,head", "without head"),
        ("none,save:matmul", "drop 'none'"),
        ("save:matmul,save:matmul/2", "contradict"),
        ("save:matmul/2+matmul/3", "'matmul/2' and 'matmul/3' contradict"),
        ("save:attention/2", "only matmul takes a fraction"),
        ("save:matmul/1", "from matmul/2 up"),
        ("every:0", "at least 1"),
        ("every:x", "as in every:2"),
        ("every", "as in every:2"),
        ("every:", "nothing after 'every:'"),
        ("full:3", "takes nothing after it"),
        ("offload:/mnt/fast", "'offload' (host memory, never a disk) takes nothing after it; write 'offload'"),
        ("stages:0", "count from 1"),
        ("modules", "modules:attention+mlp"),
        ("budget:2", "from 0 to 1"),
        ("budget:x", "from 0 to 1"),
        ("budget:0.5,full", "goes with 'head' only"),
        ("", "no term ''"),
        ("full,,head", "no term ''"),
        ("full@visoin", "did you mean 'vision'"),
        ("full@", "no tower ''"),
        ("head@language", "'head' applies to the whole model"),
        ("budget:0.5@vision", "'budget' applies to the whole model"),
        ("full@vision,every:2@vision", "full and every contradict each other"),
        ("none@vision,save:matmul@vision", "drop 'none'"),
        ("auto,full@vision", "without towers"),
        ("budget:0.5,pointwise@vision", "goes with 'head' only"),
    ],
)
def test_invalid_policy_text_is_refused(text: str, says: str) -> None:
    with pytest.raises(UserError, match=None) as error:
        Policy.parse(text)
    assert says in str(error.value)
    assert "\n" not in str(error.value)
    assert repr(text) in str(error.value)


def test_other_types_and_unknown_fields_are_refused() -> None:
    with pytest.raises(UserError, match="a policy is a string"):
        Policy.parse(3)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="did you mean 'scope'"):
        Policy.parse({"scop": "full"})
    for value in ("false", 0, None):
        with pytest.raises(UserError, match="'offload' is true or false"):
            Policy.parse({"offload": value})
    with pytest.raises(UserError, match="'save' is a list of names"):
        Policy.parse({"scope": "full", "save": "attention"})


def test_towers_in_json() -> None:
    policy = Policy.parse("full,save:matmul@language,none@vision")
    assert policy.to_dict() == {
        "scope": "full",
        "towers": {"language": {"scope": "full", "save": ["matmul"]}, "vision": {}},
    }
    assert {tower: str(part) for tower, part in policy.parts.items()} == {
        "": "full",
        "language": "save:matmul",
        "vision": "none",
    }
    for towers, says in (
        ({"visoin": {}}, "did you mean 'vision'"),
        ({"vision": "full"}, "holds a policy for each tower"),
        ({"vision": {"head": True}}, "of the whole model"),
        ({"vision": {"towers": {"language": {"scope": "full"}}}}, "of the whole model"),
    ):
        with pytest.raises(UserError, match=says):
            Policy.parse({"scope": "full", "towers": towers})


def test_policy_is_hashable() -> None:
    assert len({Policy.parse("full"), Policy.parse("per_block"), Policy()}) == 2


@pytest.mark.parametrize("text", ["full\nhead", "full,\x1b[31mhead", "no\rfull"])
def test_line_break_in_a_policy_is_refused(text: str) -> None:
    with pytest.raises(UserError) as error:
        Policy.parse(text)
    assert str(error.value).startswith(f"policy {text!r}: a policy is one line of printable characters")
    assert str(error.value).isprintable()
    assert Policy.parse(" full \n") == Policy.parse("full")

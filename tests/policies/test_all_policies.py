"""Contracts over the tables: whatever is added to POLICIES or MODELS is tested at once."""

from dataclasses import replace

import pytest
import torch

from fedcover.data.partition import PARTITIONS
from fedcover.errors import InvalidValue
from fedcover.models import MODELS, params_and_buffers
from fedcover.policies import POLICIES
from fedcover.policies.base import fits
from fedcover.registry import options_of
from fedcover.server.cohort import cohort_of, view_of
from fedcover.submodels import unit_groups
from fedcover.submodels.build import submodel
from fedcover.submodels.encoding import decode, encode
from fedcover.submodels.reductions import Masks, windows
from fedcover.types import Dataset, Samples
from tests.helpers.reference import with_masked_moments
from tests.helpers.worlds import SMALL_MODELS, same, world

NEEDED = {"regions": {"codename": "147256"}}
"""Options without which an entry of POLICIES cannot be called."""

PRUNES = {"magnitude", "prunefl", "regions"}

IGNORES_CAPACITY = {"full", "regions"}
"""`full` is the baseline that exceeds every capacity; a codename brings its own."""


@pytest.fixture(params=SMALL_MODELS)
def view(request):
    setup, state = world(request.param)
    return view_of(setup, replace(state, round=2), cohort_of(setup, 2))


def asked(name, view):
    """What the policy gives, client by client."""
    if name in PRUNES and not view.prunable:
        with pytest.raises(InvalidValue, match="names none"):
            POLICIES[name](view, **NEEDED.get(name, {}))
        pytest.skip("this model names no prunable weights, and that was refused")
    return POLICIES[name](view, **NEEDED.get(name, {}))


def called(name, view):
    """The reductions that the policy gives; clients that sit out have none."""
    return [part for part in asked(name, view) if part is not None]


@pytest.mark.parametrize("name", POLICIES)
class TestEveryPolicy:
    """What each policy promises, on each model."""

    def test_policy_gives_every_client_one_reduction(self, name, view):
        reductions = asked(name, view)
        assert len(reductions) == len(view.cohort)
        assert any(part is not None for part in reductions)

    def test_policy_is_pure(self, name, view):
        before = {key: tensor.clone() for key, tensor in view.params.items()}
        first, second = called(name, view), called(name, view)
        assert [encode(r) for r in first] == [encode(r) for r in second]
        same(view.params, before)

    @pytest.mark.parametrize("measure", ["width", "parameters"])
    def test_policy_never_exceeds_a_capacity(self, name, view, measure):
        view = replace(
            view,
            measure=measure,
            levels=(1.0, 0.5, 0.4),
            cohort=tuple(replace(c, capacity=max(0.4, c.capacity)) for c in view.cohort),
        )
        if name in IGNORES_CAPACITY:
            pytest.skip("its parts do not depend on the clients' capacities")
        try:
            pairs = zip(view.cohort, POLICIES[name](view, **NEEDED.get(name, {})), strict=True)
        except InvalidValue as error:
            pytest.skip(f"refused: {error}")
        for client, reduction in ((client, part) for client, part in pairs if part is not None):
            assert fits(view, client.capacity, reduction)
            if measure == "parameters":
                total = sum(p.numel() for p in view.params.values())
                assert sum(reduction.sizes(view.params).values()) <= client.capacity * total + 1e-6

    def test_policy_gives_capacity_one_the_whole_model(self, name, view):
        if name == "regions":
            pytest.skip("a codename brings its own capacities")
        view = replace(
            view, levels=(1.0,), cohort=tuple(replace(c, capacity=1.0) for c in view.cohort)
        )
        for reduction in called(name, view):
            assert all(bool(mask.all()) for mask in reduction.mask(view.params).values())

    def test_policy_reductions_survive_encoding(self, name, view):
        prunable = {key: view.params[key] for key in view.prunable}
        for reduction in called(name, view):
            again = decode(encode(reduction), view.groups, prunable)
            same(reduction.mask(view.params), again.mask(view.params))

    def test_policy_keeps_values_unchanged(self, name, view):
        reduction = called(name, view)[0]
        masks = reduction.mask(view.params)
        for key, part in reduction.extract(view.params).items():
            expected = view.params[key][masks[key]]
            values = part[masks[key]] if isinstance(reduction, Masks) else part.flatten()
            assert torch.equal(values, expected)


@pytest.mark.parametrize("name", MODELS)
class TestEveryModel:
    """What each model promises."""

    def test_model_has_a_size_for_tests(self, name):
        assert name in SMALL_MODELS

    def test_model_groups_fit_its_tensors(self, name):
        setup, _ = world(name)
        model = setup.task.model
        unit_groups.check_groups(model.groups, params_and_buffers(model.module))
        assert set(model.prunable) <= {key for key, _ in model.module.named_parameters()}

    @pytest.mark.parametrize("share", [1.0, 0.75, 0.5, 0.25])
    def test_sliced_model_equals_masked_model(self, name, share):
        setup, state = world(name)
        if any(group.nested for group in setup.task.model.groups):
            pytest.skip("a part of less depth ends at another exit than the whole")
        module = setup.task.model.module.eval()
        reduction = windows(
            setup.task.model.groups, share, {g.name: 1 for g in setup.task.model.groups}
        )
        sliced = submodel(module, reduction, state.params).eval()
        masked = submodel(
            module,
            Masks({}),
            {k: t * reduction.mask(state.params)[k] for k, t in state.params.items()},
        )
        x = setup.task.source.test.x[:5]
        with_masked_moments(masked.eval(), reduction.mask(state.params))
        torch.testing.assert_close(sliced(x), masked(x), rtol=1e-9, atol=1e-9)

    def test_half_width_part_is_smaller(self, name):
        setup, state = world(name)
        half = submodel(
            setup.task.model.module, windows(setup.task.model.groups, 0.5), state.params
        )
        whole = sum(p.numel() for p in state.params.values())
        assert sum(p.numel() for p in half.parameters()) < 0.75 * whole

    def test_model_depends_on_the_seed_alone(self, name):
        same(world(name)[1].params, world(name)[1].params)
        assert any(
            not torch.equal(a, b)
            for a, b in zip(
                world(name)[1].params.values(), world(name, seed=1)[1].params.values(), strict=True
            )
        )


@pytest.mark.parametrize("name", PARTITIONS)
def test_every_partition_uses_every_row_once(name):
    y = torch.arange(60) % 5
    rows = Samples(torch.randn(60, 3), y)
    data = Dataset("rows", rows, rows, classes=5, owner=torch.arange(60) % 6)
    options = {"limit": 2, "alpha": 0.3}
    needed = {key: options[key] for key in options_of(PARTITIONS[name])}
    split = PARTITIONS[name](data, 6, 0, **needed)
    parts = [split.indices(client) for client in range(6)]
    assert torch.cat(parts).sort().values.tolist() == list(range(60))
    assert all(len(part) for part in parts)

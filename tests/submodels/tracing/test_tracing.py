"""Any module: groups are found, equal to those we declare, verified, and sub-models stay ordinary modules."""

import copy
import importlib.util
import re
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fedcover as fc
from fedcover.errors import InvalidValue
from fedcover.models import MODELS, params_and_buffers
from fedcover.runs.export import export_onnx
from fedcover.submodels.build import load_tensors, submodel
from fedcover.submodels.reductions import Slices, drawn
from fedcover.submodels.tracing import trace
from fedcover.submodels.tracing.size_constraints import SIZE_CONSTRAINTS
from fedcover.submodels.tracing.tracer import record_trace
from fedcover.submodels.tracing.verify import verify_groups
from fedcover.submodels.unit_groups import check_groups
from fedcover.types import Count, Model, UnitGroup
from tests.helpers.idioms import ACCEPTED, REFUSED, Configured, Settings, Written
from tests.helpers.repository import ROOT
from tests.helpers.zoo import ZOO, zoo

IMAGE = (3, 16, 16)
DECLARED = {
    "mlp": [(IMAGE, "batch", {"hidden": [8, 6]})],
    "cnn": [(IMAGE, "batch", {"channels": [4, 6], "hidden": 8})],
    "wide_resnet": [(IMAGE, norm, {"depth": 10, "widen": 1}) for norm in ("batch", "group")],
    "preact_resnet18": [(IMAGE, norm, {"width": 8}) for norm in ("batch", "group")],
    "transformer": [((6,), "batch", {"width": 8, "heads": 4, "blocks": 2, "hidden": 8})],
    "lstm": [
        ((6,), "batch", {"hidden": 8, **more}) for more in ({}, {"labels": "last"}, {"layers": 3})
    ],
    "lora": [((5,), "batch", {"hidden": [8], "rank": 4})],
}
"""Models of ours whose groups are widths, in a size for tests."""

FROZEN = {"lora": ("hidden1.up",)}
"""What a model leaves whole on purpose: the hidden units of a network of which only adapters are learned."""


@pytest.fixture(autouse=True)
def seeded():
    """The same weights and inputs every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def places(groups):
    """What groups cut, whatever they are called and in whichever order."""
    return {(group.size, frozenset(group.cuts)) for group in groups}


@pytest.fixture(scope="module")
def traced():
    """Groups of the models of the zoo, each traced once."""
    known = {}

    def groups_of(name):
        if name not in known:
            known[name] = trace(*zoo(name))
        return known[name]

    return groups_of


class TestOurModels:
    """Tracing and declaring agree."""

    @pytest.mark.parametrize("name", DECLARED)
    def test_the_groups_are_those_that_are_declared(self, name):
        for shape, norm, options in DECLARED[name]:
            model = MODELS[name](shape, 5, norm, **options)
            example = (
                torch.randint(5, (3, *shape))
                if name in ("transformer", "lstm")
                else torch.randn(3, *shape)
            )
            assert places(trace(model.module, example, whole=FROZEN.get(name, ()))) == places(
                model.groups
            )

    def test_a_model_that_is_cut_in_depth_can_also_be_cut_in_width(self):
        model = MODELS["depth_resnet"](IMAGE, 5, "batch", width=4, stages=2, blocks=1)
        assert all(
            cut.axis is not None
            for group in trace(model.module, torch.randn(3, *IMAGE))
            for cut in group.cuts
        )

    def test_every_model_of_the_table_is_here(self):
        assert set(MODELS) == {
            *DECLARED,
            "depth_resnet",
            "softmax",
        }  # softmax has no hidden units: it cuts its inputs


FOUND = {
    "resnet": [
        ("conv1", 6),
        ("layer1.0.downsample.0", 8),
        *((f"layer1.{block}.{conv}", 4) for block in (0, 1) for conv in ("conv1", "conv2")),
        ("layer2.0.downsample.0", 16),
        *((f"layer2.{block}.{conv}", 8) for block in (0, 1) for conv in ("conv1", "conv2")),
    ],
    "convnext": [("stem", 8), ("pw1", 24), ("squeeze", 4)],
    "vgg": [
        ("features.0", 6),
        ("features.4", 8),
        ("features.8", 10),
        ("features.11", 10),
        ("classifier.0", 12),
        ("classifier.3", 9),
    ],
    "resnext": [
        ("conv1", 6),
        ("layer1.0.downsample.0", 8),
        ("layer1.0.conv1", 2),
        ("layer1.1.conv1", 2),
        ("layer2.0.downsample.0", 16),
        ("layer2.0.conv1", 2),
        ("layer2.1.conv1", 2),
    ],
    "mobilenet": [
        ("features.0", 4),
        ("features.3.conv.0", 8),
        ("features.3.conv.6", 6),
        ("features.4.conv.0", 18),
        ("features.5.conv.0", 12),
        ("features.5.conv.6", 8),
        ("features.6", 12),
    ],
    "vit": [
        ("patch", 12),
        ("blocks.0.attn.qkv", 3),
        ("blocks.0.mlp.0", 24),
        ("blocks.1.attn.qkv", 3),
        ("blocks.1.mlp.0", 24),
    ],
    "gpt": [("wte", 3), ("h.0.c_fc", 48), ("h.1.c_fc", 48)],
    "gpt_free": [
        ("wte", 12),
        ("h.0.attn.qkv", 3),
        ("h.0.c_fc", 48),
        ("h.1.attn.qkv", 3),
        ("h.1.c_fc", 48),
    ],
    "llama": [("tok", 16), ("wq", 2), ("w1", 24)],
    "encoder": [("embed", 3), ("layers.0.linear1", 16), ("layers.1.linear1", 16)],
    "unet": [("down1.0", 4), ("down2.0", 12), ("up", 6), ("mix.0", 10)],
    "shuffle": [("stem", 4)],
    "dense": [("stem", 4), ("convs.0", 3), ("convs.1", 3), ("convs.2", 3)],
}


@pytest.mark.parametrize("name", ZOO)
class TestTheZoo:
    """Models as other people write them."""

    def test_groups_fit_and_have_something_to_choose(self, name, traced):
        module, _ = zoo(name)
        check_groups(traced(name), params_and_buffers(module))
        assert all(group.size > 1 for group in traced(name))

    def test_the_groups_are_the_expected_ones(self, name, traced):
        assert [(group.name, group.size) for group in traced(name)] == FOUND[name]

    def test_a_forgotten_cut_is_noticed(self, name, traced):
        module, example = zoo(name)
        notes = record_trace(module, (example,))
        draw = torch.Generator().manual_seed(0)
        for group in traced(name)[:4]:
            at = int(torch.randint(len(group.cuts), (), generator=draw))
            if ".running_" in group.cuts[at].tensor:
                at = 0
            broken = UnitGroup(
                group.name, group.size, group.cuts[:at] + group.cuts[at + 1 :], counts=group.counts
            )
            others = tuple(broken if other is group else other for other in traced(name))
            with pytest.raises(InvalidValue, match=re.escape(repr(group.name))):
                verify_groups(module, (example,), others, notes)

    def test_a_sub_model_can_be_exported(self, name, traced):
        module, example = zoo(name)
        part = submodel(module, drawn(traced(name), 0.5, key=3), {}).eval()
        again = torch.export.export(part, (example,)).module()
        torch.testing.assert_close(again(example), part(example))

    def test_a_sub_model_is_saved_and_loaded(self, name, traced):
        module, example = zoo(name)
        reduction = drawn(traced(name), 0.5, key=3)
        part = submodel(module, reduction, {}).eval()
        other = submodel(module, reduction, {key: t + 1 for key, t in module.named_parameters()})
        other.load_state_dict(part.state_dict())
        torch.testing.assert_close(other.eval()(example), part(example))


class MaskedLayerNorm(nn.Module):
    """Layer norm over the features that are kept, written once more and independently."""

    def __init__(self, norm, kept):
        super().__init__()
        self.weight, self.bias, self.eps = norm.weight, norm.bias, norm.eps
        self.register_buffer("kept", kept.double())

    def forward(self, x):
        share = self.kept / self.kept.sum()
        mean = (x * share).sum(-1, keepdim=True)
        variance = ((x - mean) ** 2 * share).sum(-1, keepdim=True)
        return self.kept * ((x - mean) / (variance + self.eps).sqrt() * self.weight + self.bias)


def masked(module, masks):
    """The dense model with zeros where units are cut, and layer norms that know it."""
    dense = load_tensors(
        copy.deepcopy(module),
        {n: torch.where(masks[n], t, 0) for n, t in params_and_buffers(module).items()},
    )
    for path, layer in list(dense.named_modules()):
        if isinstance(layer, nn.LayerNorm):
            parent, _, leaf = path.rpartition(".")
            setattr(
                dense.get_submodule(parent), leaf, MaskedLayerNorm(layer, masks[f"{path}.weight"])
            )
    return dense


def without_dropout(module):
    for layer in module.modules():
        if isinstance(layer, nn.Dropout | nn.Dropout2d):
            layer.p = 0.0
        if isinstance(getattr(layer, "dropout", None), float):
            layer.dropout = 0.0
    return module


@pytest.mark.parametrize("name", [name for name in ZOO if name not in ("llama", "convnext")])
def test_sliced_training_equals_masked_dense_training(name, traced):
    """Law 1 on the zoo: steps of SGD with momentum and decay, in float64, on batch and tracked statistics."""
    module, example = zoo(name)
    module = without_dropout(module).double().train()
    example = example.double() if example.is_floating_point() else example
    reduction = drawn(traced(name), 0.5, key=5)
    part, dense = (
        submodel(module, reduction, {}),
        masked(module, reduction.mask(params_and_buffers(module))),
    )
    masks = reduction.mask(dict(module.named_parameters()))
    for net in (part, dense):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
        for step in range(3):
            optimizer.zero_grad()
            out = net(example)
            direction = torch.randn(
                out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(step)
            )
            (out * direction).mean().backward()
            for key, weight in net.named_parameters() if net is dense else ():
                weight.grad *= masks[key]
            optimizer.step()
    trained = reduction.extract(
        {key: t for key, t in params_and_buffers(dense).items() if not key.endswith(".kept")}
    )
    for key, tensor in params_and_buffers(part).items():
        torch.testing.assert_close(
            tensor, trained[key], rtol=1e-8, atol=1e-9, msg=lambda m, k=key: f"{k}: {m}"
        )
    torch.testing.assert_close(part.eval()(example), dense.eval()(example), rtol=1e-8, atol=1e-9)


class TestNumbers:
    """What modules keep as plain numbers follows the units that they count."""

    def half(self, name, traced):
        return submodel(zoo(name)[0], drawn(traced(name), 0.5, key=1), {})

    def test_heads_are_counted(self, traced):
        part = self.half("vit", traced)
        assert (part.blocks[0].attn.num_heads, part.blocks[0].attn.head_dim) == (1, 4)
        assert part.blocks[0].attn.qkv.weight.shape == (12, 6)
        (count,) = next(
            group for group in traced("vit") if group.name == "blocks.1.attn.qkv"
        ).counts
        assert count == Count("blocks.1.attn.num_heads", 1)

    def test_heads_and_stream_go_together_where_the_code_says_so(self, traced):
        part = self.half("gpt", traced)
        assert (part.h[0].attn.n_head, part.h[0].attn.n_embd, part.wte.embedding_dim) == (1, 4, 4)
        assert part.block_size == 8

    def test_torch_layers_are_told(self, traced):
        attention = self.half("encoder", traced).layers[0].self_attn
        assert (attention.embed_dim, attention.num_heads, attention.head_dim, attention.kdim) == (
            4,
            1,
            4,
            4,
        )
        net = self.half("convnext", traced)
        assert (net.dw.groups, net.dw.in_channels, net.dw.out_channels) == (4, 4, 4)
        assert net.norm.normalized_shape == (4,)
        net = self.half("unet", traced)
        assert (net.up.in_channels, net.up.out_channels, net.mix[1].num_parameters) == (6, 3, 5)
        assert (net.down1[1].num_groups, net.down1[1].num_channels, net.down2[1].num_features) == (
            2,
            4,
            6,
        )
        assert self.half("llama", traced).norm3.normalized_shape == (8,)

    def test_queries_follow_the_keys_that_they_share(self, traced):
        part = self.half("llama", traced)
        assert (part.n_heads, part.n_kv_heads, part.head_dim, part.n_rep) == (2, 1, 4, 2)

    def test_a_shared_configuration_is_counted_once(self):
        settings = Settings()
        module = nn.Sequential(
            nn.Linear(5, 8), Configured(settings), Configured(settings), nn.Linear(8, 2)
        )
        groups = trace(module, torch.randn(3, 4, 5))
        part = submodel(module, drawn(groups, 0.5, key=0), {})
        assert vars(settings) == {"heads": 4, "width": 8}
        assert vars(part[1].settings) == {"heads": 2, "width": 4}
        assert part[1].settings is part[2].settings

    def test_tied_weights_stay_tied(self, traced):
        part = self.half("gpt", traced)
        assert part.lm_head.weight is part.wte.weight
        assert part.lm_head.in_features == part.wte.embedding_dim
        again = load_tensors(part, {key: t + 1 for key, t in part.state_dict().items()})
        assert again.lm_head.weight is again.wte.weight


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_cut_is_refused_by_name(name):
    make, shape, sentence = REFUSED[name]
    with pytest.raises(InvalidValue, match=rf"^tracing: .*{sentence}"):
        trace(make(), torch.randn(shape))


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_can_be_cut_is_found(name):
    make, shape, expected = ACCEPTED[name]
    module = make()
    groups = trace(module, torch.randn(shape))
    assert {group.name: group.size for group in groups} == expected


class TestManners:
    """Tracing leaves no trace."""

    def test_the_module_and_the_random_state_are_left_alone(self):
        module, example = zoo("gpt")
        module.eval()
        before, hooks = copy.deepcopy(module), len(module._forward_hooks)
        state, kept = torch.get_rng_state(), example.clone()
        trace(module, example)
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.equal(example, kept)
        assert all(
            torch.equal(tensor, before.state_dict()[key])
            for key, tensor in module.state_dict().items()
        )
        assert (module.training, type(module.h[0].attn.n_head), len(module._forward_hooks)) == (
            False,
            int,
            hooks,
        )

    def test_it_answers_alike_every_time(self, traced):
        assert trace(*zoo("unet")) == traced("unet")

    def test_parts_are_kept_whole_on_demand(self):
        module = nn.Sequential(
            nn.Linear(5, 6), nn.Softmax(-1), nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 2)
        )
        assert [group.name for group in trace(module, torch.randn(3, 5), whole=("0",))] == ["2"]
        with pytest.raises(InvalidValue, match=r"^whole must be one of 0, 2; got '9'$"):
            trace(module, torch.randn(3, 5), whole=("9",))

    def test_a_call_that_cannot_be_followed_is_not_said_to_be_the_modules_mistake(
        self, monkeypatch
    ):
        monkeypatch.setitem(SIZE_CONSTRAINTS, "chunk", lambda labels, args, kwargs, out: args[9])
        make, shape, _ = ACCEPTED["halves"]
        with pytest.raises(
            InvalidValue, match=r"^tracing: fedcover cannot follow operation 'chunk' in the model"
        ):
            trace(make(), torch.randn(shape))

    def test_layers_with_weight_norm_are_told_their_sizes(self):
        make, shape, _ = ACCEPTED["weight norm of linear layers"]
        module = make()
        part = submodel(module, drawn(trace(module, torch.randn(shape)), 0.5, key=0), {})
        assert (part[0].out_features, part[2].in_features) == (3, 3)
        assert part[0].parametrizations.weight.original1.shape == (3, 5)

    def test_the_hint_of_a_refusal_works(self):
        make, shape, _ = REFUSED["recurrent layer that reads units along time"]
        assert [group.name for group in trace(make(), torch.randn(shape), whole=("a",))] == ["r"]
        vit, example = zoo("vit")
        assert all(
            not g.name.startswith("blocks.0") for g in trace(vit, example, whole=("blocks.0",))
        )

    def test_other_precisions_are_verified_in_float64(self):
        module = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 2)).bfloat16()
        assert [group.size for group in trace(module, torch.randn(3, 5).bfloat16())] == [6]

    def alike(self, difference):
        """A batch norm of two rows that hardly differ, and these rows."""
        module = nn.Sequential(
            nn.Linear(50, 64),
            nn.Tanh(),
            nn.Linear(64, 6),
            nn.BatchNorm1d(6, eps=1e-30),
            nn.Linear(6, 2),
        )
        return module.double(), torch.randn(1, 50).double() + difference * torch.randn(
            2, 50
        ).double()

    def test_rounding_is_no_reason_to_refuse(self):
        assert [group.size for group in trace(*self.alike(1e-3))] == [64, 6]

    def test_a_forgotten_cut_is_noticed_behind_rounding(self):
        module, example = self.alike(1e-3)
        first, second = trace(module, example)
        for at in range(len(first.cuts)):
            broken = UnitGroup(first.name, first.size, first.cuts[:at] + first.cuts[at + 1 :])
            with pytest.raises(InvalidValue, match=r"cutting '0'"):
                verify_groups(
                    module, (example,), (broken, second), record_trace(module, (example,))
                )

    def test_where_rounding_is_all_there_is_more_rows_are_asked_for(self):
        with pytest.raises(
            InvalidValue, match=r"^tracing: rounding alone changes .* give an example of more rows$"
        ):
            trace(*self.alike(1e-9))

    def test_several_inputs(self):
        module = Written(
            lambda m, x, y: m.b(torch.cat([m.a(x), y], 1)), a=nn.Linear(5, 6), b=nn.Linear(8, 2)
        )
        (group,) = trace(module, (torch.randn(3, 5), torch.randn(3, 2)))
        assert [(cut.tensor, cut.start) for cut in group.cuts] == [
            ("a.weight", 0),
            ("a.bias", 0),
            ("b.weight", 0),
        ]


@given(seed=st.integers(0, 10_000))
@settings(max_examples=12, deadline=None)
def test_random_networks_are_cut_or_refused_never_wrong(seed):
    """Chains of layers, residuals, concatenations and halves: whatever is found can be sliced and agrees."""
    draw = torch.Generator().manual_seed(seed)
    module = Chain([int(kind) for kind in torch.randint(5, (5,), generator=draw)])
    example = torch.randn(4, 6, generator=draw)
    groups = trace(module, example)
    assert groups
    kept = {
        g.name: torch.randperm(g.size, generator=draw)[: max(1, g.size // 2)].sort().values
        for g in groups
    }
    assert submodel(module, Slices(groups, kept), {})(example).shape == (4, 3)


class Chain(nn.Module):
    """A network drawn from five kinds of steps."""

    def __init__(self, kinds):
        super().__init__()
        self.kinds, self.layers, width = kinds, nn.ModuleList([nn.Linear(6, 8)]), 8
        for kind in kinds:
            out = width + 4 if kind == 2 else width
            self.layers.append(
                nn.Linear(width, 4 if kind == 2 else 2 * width if kind == 3 else width)
            )
            self.layers.append(nn.BatchNorm1d(out) if kind != 4 else nn.LayerNorm(out))
            width = out
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        x = self.layers[0](x)
        for i, kind in enumerate(self.kinds):
            y = self.layers[2 * i + 1](x.relu())
            if kind == 1:
                y = x + y
            elif kind == 2:
                y = torch.cat([x, y], dim=-1)
            elif kind == 3:
                value, gate = y.chunk(2, dim=-1)
                y = value * gate.sigmoid()
            x = self.layers[2 * i + 2](y)
        return self.head(x)


def test_a_traced_model_trains_in_a_federation():
    module = nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 3, groups=6), nn.Flatten(),
        nn.Linear(216, 10),
    )  # fmt: skip
    model = Model(module, trace(module, torch.randn(2, 1, 8, 8)))
    experiment = fc.Experiment(
        fleet="1x1.0 + 1x0.5", policy="rolling", clients=20, active=4, rounds=2, epochs=1
    )
    run = fc.run(experiment, model=model)
    assert run.submodel(0.5)[3].groups == 3
    assert run.accuracy > 0.1


@pytest.mark.parametrize("name", ["mobilenet", "vit", "gpt"])
def test_a_sub_model_becomes_an_onnx_file(name, traced, tmp_path):
    for package in ("onnx", "onnxscript", "onnxruntime"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import onnxruntime
    module, example = zoo(name)
    part = submodel(module, drawn(traced(name), 0.5, key=3), {}).eval()
    file = export_onnx(part, example, tmp_path / "part.onnx")
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    larger = torch.cat([example, example])  # another batch size than the example's
    (out,) = session.run(None, {session.get_inputs()[0].name: larger.numpy()})
    torch.testing.assert_close(torch.from_numpy(out), part(larger), rtol=1e-4, atol=1e-4)


def test_without_the_packages_onnx_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        InvalidValue, match=r"^writing ONNX needs onnx and onnxscript; .*: pip install"
    ):
        export_onnx(nn.Linear(2, 2), torch.randn(1, 2), tmp_path / "no.onnx")


def test_the_python_of_the_document_runs():
    names: dict[str, object] = {}
    text = (ROOT / "docs" / "tracing.md").read_text()
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(block, "tracing.md", "exec"), names)
    assert names["half"][3].groups == 8

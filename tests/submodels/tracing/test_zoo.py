"""Models as other people write them: their groups, and sub-models that train and travel."""

import copy
import importlib.util
import re
import warnings

import pytest
import torch
from torch import nn

from fedcover.errors import InvalidValue
from fedcover.models import params_and_buffers
from fedcover.runs.export import export_onnx
from fedcover.submodels.build import load_tensors, submodel
from fedcover.submodels.reductions import drawn
from fedcover.submodels.tracing import trace
from fedcover.submodels.tracing.tracer import record_trace
from fedcover.submodels.tracing.verify import verify_groups
from fedcover.submodels.unit_groups import check_groups
from fedcover.types import Count, UnitGroup
from tests.helpers.idioms import Configured, Settings
from tests.helpers.zoo import ZOO, zoo

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

    def test_traced_groups_fit_and_have_several_units(self, name, traced):
        module, _ = zoo(name)
        check_groups(traced(name), params_and_buffers(module))
        assert all(group.size > 1 for group in traced(name))

    def test_traced_groups_are_the_expected_ones(self, name, traced):
        assert [(group.name, group.size) for group in traced(name)] == FOUND[name]

    def test_missing_cut_is_noticed(self, name, traced):
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

    def test_sub_model_can_be_exported(self, name, traced):
        module, example = zoo(name)
        part = submodel(module, drawn(traced(name), 0.5, key=3), {}).eval()
        again = torch.export.export(part, (example,)).module()
        torch.testing.assert_close(again(example), part(example))

    def test_sub_model_is_saved_and_loaded(self, name, traced):
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
    """Law 1 on the zoo: steps of SGD with momentum and decay, in float64, on batch and tracked
    statistics.
    """
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

    def test_heads_follow_the_kept_units(self, traced):
        part = self.half("vit", traced)
        assert (part.blocks[0].attn.num_heads, part.blocks[0].attn.head_dim) == (1, 4)
        assert part.blocks[0].attn.qkv.weight.shape == (12, 6)
        (count,) = next(
            group for group in traced("vit") if group.name == "blocks.1.attn.qkv"
        ).counts
        assert count == Count("blocks.1.attn.num_heads", 1)

    def test_heads_and_stream_are_cut_together(self, traced):
        part = self.half("gpt", traced)
        assert (part.h[0].attn.n_head, part.h[0].attn.n_embd, part.wte.embedding_dim) == (1, 4, 4)
        assert part.block_size == 8

    def test_torch_layer_attributes_follow_the_kept_units(self, traced):
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

    def test_shared_configuration_is_counted_once(self):
        settings = Settings()
        module = nn.Sequential(
            nn.Linear(5, 8), Configured(settings), Configured(settings), nn.Linear(8, 2)
        )
        groups = trace(module, torch.randn(3, 4, 5))
        part = submodel(module, drawn(groups, 0.5, key=0), {})
        assert vars(settings) == {"heads": 4, "width": 8}
        assert vars(part[1].settings) == {"heads": 2, "width": 4}
        assert part[1].settings is part[2].settings

    def test_tied_weights_stay_tied_in_traced_sub_models(self, traced):
        part = self.half("gpt", traced)
        assert part.lm_head.weight is part.wte.weight
        assert part.lm_head.in_features == part.wte.embedding_dim
        again = load_tensors(part, {key: t + 1 for key, t in part.state_dict().items()})
        assert again.lm_head.weight is again.wte.weight


@pytest.mark.parametrize("name", ["mobilenet", "vit", "gpt"])
def test_sub_model_becomes_an_onnx_file(name, traced, tmp_path):
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

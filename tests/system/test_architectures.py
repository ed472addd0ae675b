"""Architectures of other libraries: a sample is traced here, and the table of all of them is what
was measured.
"""

from importlib.util import find_spec

import pytest
from benchmarks.architectures.__main__ import tried
from benchmarks.architectures.borrowed import import_timm
from benchmarks.architectures.families import TIMM, Architecture, architectures
from benchmarks.architectures.page import PLAIN
from benchmarks.architectures.trial import attempt

pytestmark = pytest.mark.system
SAMPLE = {
    "MobileNetV3": Architecture("timm", "mobilenetv3", "mobilenetv3_small_050"),
    "RegNet-Y": Architecture("timm", "regnet", "regnety_002"),
    "NF-ResNet": Architecture("timm", "nfnet", "test_nfnet"),
    "ConvNeXt": Architecture("timm", "convnext", "test_convnext"),
    "ViT": Architecture("timm", "vision_transformer", "test_vit"),
    "ViT with registers": Architecture("timm", "eva", "vit_tiny_patch16_dinov3_qkvb", {"depth": 2}),
    "ResNet": Architecture("timm", "resnet", "test_resnet"),
    "ShuffleNetV2": Architecture("torchvision", "shufflenetv2", "shufflenetv2"),
    **{each.family: each for each in architectures() if each.family in ("bert", "gpt2", "llama")},
}
AVERAGING = ("NF-ResNet", "ConvNeXt", "ViT", "ViT with registers", "bert", "gpt2", "llama")
"""Those that average over units, which plain zeros change."""


@pytest.mark.parametrize("name", SAMPLE)
def test_architecture_sample_is_cut_and_equals_its_mask(name):
    chosen = SAMPLE[name]
    if chosen.library != "torchvision" and find_spec(chosen.library) is None:
        pytest.skip(f"{chosen.library} is not installed (make architectures installs it)")
    row = attempt(chosen)
    assert row["outcome"] == "cut", row
    assert row["groups"] >= 3
    assert row["half"] < 0.5
    assert row["difference"] <= PLAIN or name in AVERAGING


@pytest.mark.skipif(
    find_spec("timm") is None, reason="timm is not installed (make architectures installs it)"
)
def test_timm_families_are_all_listed():
    timm = import_timm()
    families = {name for name in timm.list_modules() if timm.list_models(module=name)}
    assert families == TIMM.keys()
    assert all(model in timm.list_models(module=family) for family, model in TIMM.items())


def test_late_and_broken_architectures_have_a_row():
    small = Architecture("torchvision", "squeezenet", "squeezenet")
    assert tried(small, 0.0)["outcome"] == "late"
    assert tried(Architecture("nowhere", "squeezenet", "squeezenet"), 60.0)["outcome"] == "unable"

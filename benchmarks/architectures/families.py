"""The architectures: one small model of every family of timm, of torchvision's others, and of
transformers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.architectures.borrowed import import_timm
from benchmarks.architectures.classics import CLASSICS

PIXELS, ROWS, TOKENS, VOCABULARY = 64, 4, 12, 50

LARGEST = 60_000_000
"""Parameters beyond which a model is not tried: several copies of it in float64 are held at once.
"""

TIMM: Mapping[str, str] = dict(
    line.split()
    for line in """
beit beit_base_patch16_224
byoanet eca_botnext26ts_256
byobnet mobileone_s1
cait cait_xxs24_224
coat coat_tiny
convit convit_tiny
convmixer convmixer_768_32
convnext convnext_zepto_rms
cpubone cpubone_nano
crossvit crossvit_tiny_240
csatv2 csatv2
cspnet cs3darknet_focus_s
cspnext cspnext_tiny
davit davit_tiny
deepseek_vit deepseek_vit_412m
deit deit_tiny_patch16_224
densenet densenet121
dla dla46x_c
dpn dpn48b
edgenext edgenext_xx_small
efficientformer efficientformer_l1
efficientformer_v2 efficientformerv2_s0
efficientnet mobilenetv2_035
efficientvim efficientvim_m1
efficientvit_mit efficientvit_b0
efficientvit_msra efficientvit_m0
eva vit_tiny_patch16_dinov3_qkvb
fasternet fasternet_t0
fastvit fastvit_t8
focalnet focalnet_tiny_srf
gcvit gcvit_xxtiny
gemma4_vit gemma4_vit_167m
ghostnet ghostnet_050
hardcorenas hardcorenas_b
hgnet hgnetv2_b0
hiera hiera_tiny_224
hieradet_sam2 sam2_hiera_tiny
hrnet hrnet_w18_small
iformer iformer_t
inception_next inception_next_atto
inception_resnet_v2 inception_resnet_v2
inception_v3 inception_v3
inception_v4 inception_v4
lcnetv2 lcnetv2_small
levit levit_128s
lowformer lowformer_b0
mambaout mambaout_femto
maxxvit maxvit_pico_rw_256
metaformer poolformerv2_s12
mlp_mixer gmlp_ti16_224
mobilenetv3 mobilenetv3_small_050
mobilenetv5 mobilenetv5_base
mobilevit mobilevit_xxs
mvitv2 mvitv2_tiny
naflexvit naflexvit_base_patch16_parfac_gap
nasnet nasnetalarge
nest nest_tiny
nextvit nextvit_small
nfnet nf_regnet_b0
pit pit_ti_224
pnasnet pnasnet5large
pvt_v2 pvt_v2_b0
qwen3_vit qwen3_vit_88m
rdnet rdnet_tiny
regnet regnetx_002
repghost repghostnet_050
repvit repvit_m1
res2net res2next50
resnest resnest14d
resnet resnet10t
resnetv2 resnetv2_18
rexnet rexnet_100
selecsls selecsls42
senet legacy_seresnet18
sequencer sequencer2d_s
shvit shvit_s1
sknet skresnet18
starnet starnet_s050
swiftformer swiftformer_xs
swin_transformer swin_tiny_patch4_window7_224
swin_transformer_v2 swinv2_tiny_window8_256
swin_transformer_v2_cr swinv2_cr_tiny_224
tiny_vit tiny_vit_5m_224
tnt tnt_s_legacy_patch16_224
tresnet tresnet_m
twins twins_svt_small
vgg vgg11
visformer visformer_tiny
vision_transformer vit_tiny_patch16_224
vision_transformer_hybrid vit_tiny_r_s16_p8_224
vision_transformer_relpos vit_srelpos_small_patch16_224
vision_transformer_sam samvit_base_patch16_224
vitamin vitamin_small_224
volo volo_d1_224
vovnet ese_vovnet19b_slim_dw
xception legacy_xception
xception_aligned xception41p
xcit xcit_nano_12_p8_224
""".strip().splitlines()
)
"""Every family of timm (a module of `timm.models`) and its published model with the fewest
parameters that runs.
"""

SMALLER: Mapping[str, Mapping[str, Any]] = {
    "beit": {"depth": 3},
    "deepseek_vit": {"depth": 2, "embed_dim": 256, "num_heads": 4, "patch_size": 16},
    "gemma4_vit": {"depth": 2},
    "naflexvit": {"depth": 3},
    "nasnet": {"num_features": 1056},
    "qwen3_vit": {"depth": 3},
    "vgg": {"mlp_ratio": 0.125},
    "vision_transformer_sam": {"depth": 3, "global_attn_indexes": [2]},
}
"""How models that are larger are built smaller, where timm has options for it: fewer blocks, or
narrower.
"""

WIDTHS = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
TEXT = {"vocab_size": VOCABULARY, "max_position_embeddings": 32, **WIDTHS}
SHARED_KEYS = {**TEXT, "num_key_value_heads": 2}
EMBEDDED = {**TEXT, "embedding_size": 16}
TRANSFORMERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "albert": ("SequenceClassification", EMBEDDED),
    "bert": ("SequenceClassification", TEXT),
    "distilbert": (
        "SequenceClassification",
        {
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 32,
            "dim": 32,
            "n_layers": 2,
            "n_heads": 4,
            "hidden_dim": 48,
        },
    ),
    "electra": ("SequenceClassification", EMBEDDED),
    "gemma": ("CausalLM", {**SHARED_KEYS, "head_dim": 8}),
    "gpt2": (
        "CausalLM",
        {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4},
    ),
    "gpt_neox": ("CausalLM", TEXT),
    "llama": ("CausalLM", SHARED_KEYS),
    "mistral": ("CausalLM", SHARED_KEYS),
    "opt": (
        "CausalLM",
        {
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 32,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "ffn_dim": 48,
            "word_embed_proj_dim": 32,
        },
    ),
    "phi": ("CausalLM", TEXT),
    "qwen2": ("CausalLM", SHARED_KEYS),
    "roberta": ("SequenceClassification", TEXT),
}
"""Families of transformers, what they are asked for, and their tiny configurations."""


@dataclass(frozen=True)
class Architecture:
    """A model of a family, and how it is built."""

    library: str
    family: str
    model: str
    options: Mapping[str, Any] = field(default_factory=dict)


def architectures() -> list[Architecture]:
    """All of them."""
    listed = [
        Architecture("timm", family, model, SMALLER.get(family, {}))
        for family, model in TIMM.items()
    ]
    listed += [Architecture("torchvision", family, family) for family in CLASSICS]
    listed += [
        Architecture("transformers", name, task, options)
        for name, (task, options) in TRANSFORMERS.items()
    ]
    return listed


def build(architecture: Architecture) -> tuple[nn.Module, Tensor]:
    """A model and an example of what it takes."""
    torch.manual_seed(0)
    return BUILDERS[architecture.library](architecture)


def _timm(architecture: Architecture) -> tuple[nn.Module, Tensor]:
    timm, options = import_timm(), {"num_classes": 10, **architecture.options}
    try:
        module = timm.create_model(architecture.model, img_size=PIXELS, **options)
    except Exception:  # a model that takes images of any size does not take this option
        module = timm.create_model(architecture.model, **options)
    return module, torch.randn(ROWS, 3, PIXELS, PIXELS)


def _torchvision(architecture: Architecture) -> tuple[nn.Module, Tensor]:
    return CLASSICS[architecture.family](), torch.randn(ROWS, 3, PIXELS, PIXELS)


def _transformers(architecture: Architecture) -> tuple[nn.Module, Tensor]:
    import transformers

    settings = transformers.AutoConfig.for_model(
        architecture.family, use_cache=False, bos_token_id=1, eos_token_id=2, **architecture.options
    )
    module = getattr(transformers, f"AutoModelFor{architecture.model}").from_config(settings)
    return module, torch.randint(3, VOCABULARY, (ROWS, TOKENS))


BUILDERS: Mapping[str, Callable[[Architecture], tuple[nn.Module, Tensor]]] = {
    "timm": _timm,
    "torchvision": _torchvision,
    "transformers": _transformers,
}

"""Which attention modules of transformers and timm are found, with random weights, two layers, bf16, in inference and in training.

``python tests/families/attention/model_attentions.py [name ...]`` prints, for each model, how many softmaxes an eager run takes, how many
attentions were found, and why the others were not. It needs transformers and timm; nothing is downloaded.
"""

from __future__ import annotations

import functools
import logging
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from families.compiled_results import whole_report
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fusebackend import backend

OPTIONS = {"fuse.patterns": ["attention"], "fuse.interpret": True, "fuse.gate": "off"}
TOKENS = 24


def each(names: str, value: Any) -> dict[str, Any]:
    return dict.fromkeys(names.split(), value)


#: Of all configurations, as far as they know these names.
SMALL: dict[str, Any] = {
    **each("hidden_size d_model n_embd dim encoder_ffn_dim decoder_ffn_dim embedding_size emb_dim", 64),
    **each("intermediate_size d_ff ffn_dim n_inner hidden_dim", 128),
    **each("num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers num_decoder_layers", 2),
    **each("num_attention_heads num_heads n_head n_heads encoder_attention_heads decoder_attention_heads", 4),
    **each(
        "attention_dropout attention_probs_dropout_prob attn_pdrop hidden_dropout_prob hidden_dropout dropout resid_pdrop embd_pdrop", 0.0
    ),
    **each("dropout_rate layerdrop activation_dropout encoder_layerdrop decoder_layerdrop feat_proj_dropout final_dropout", 0.0),
    **each("drop_path_rate classifier_dropout embedding_dropout conformer_conv_dropout", 0.0),
    **each("head_dim d_kv", 16),
    **each("eos_token_id bos_token_id decoder_start_token_id", 1),
    **each("use_cache apply_spec_augment", False),
    **{"vocab_size": 200, "max_position_embeddings": 128, "pad_token_id": 0, "num_key_value_heads": 2, "type_vocab_size": 2},
    **{"rotary_dim": 8, "sliding_window": 8, "image_size": 32, "patch_size": 8},
}
_BOTTLENECK = {"embedding_size": 32, "true_hidden_size": 64, "intra_bottleneck_size": 64, "use_bottleneck": False}
_PYRAMID = {"depths": [1, 1], "num_encoder_blocks": 2, "hidden_sizes": [32, 64], "num_attention_heads": [2, 4], "sr_ratios": [2, 1]}
_PATCHES = {"patch_sizes": [7, 3], "strides": [4, 2], "mlp_ratios": [2, 2]}
_LEVIT = {**each("hidden_sizes", [64] * 3), **each("num_attention_heads", [4] * 3), **each("depths mlp_ratio attention_ratio", [2] * 3)}
_WINDOWS = {"embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4, "patch_size": 2}
_SOUND = {
    **{"conv_dim": [32, 32], "conv_kernel": [10, 3], "conv_stride": [5, 2], "num_feat_extract_layers": 2},
    **{"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4},
}
#: Of some.
OF: dict[str, dict[str, Any]] = {
    **each("albert electra", {"embedding_size": 32}),
    **each("beit data2vec-vision", {"use_relative_position_bias": True}),
    **each("hubert wav2vec2 wavlm", _SOUND),
    **each("swin swinv2", _WINDOWS),
    "deberta": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "deberta-v2": {
        **{"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 16},
        **{"norm_rel_ebd": "layer_norm", "share_att_key": True},
    },
    "esm": {"position_embedding_type": "rotary", "mask_token_id": 2},
    "falcon alibi": {"alibi": True},
    "gemma": {"num_key_value_heads": 4},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "levit": {**_LEVIT, "key_dim": [16] * 3, "image_size": 128, "patch_size": 16, "drop_path_rate": 0},
    "longt5": {"encoder_attention_type": "local", "local_radius": 7},
    "mobilebert": _BOTTLENECK,
    "modernbert": {"global_attn_every_n_layers": 2, "local_attention": 16},
    "mpt": {"attn_config": {"attn_pdrop": 0}},
    "sam_vision_model": {"window_size": 2, "output_channels": 16, "global_attn_indexes": [1], "num_pos_feats": 8, "mlp_dim": 128},
    "segformer": {**_PYRAMID, **_PATCHES},
    "umt5": {"is_encoder_decoder": True},
    "wav2vec2-bert": {"feature_projection_input_dim": 32, "left_max_position_embeddings": 8, "right_max_position_embeddings": 8},
    "wav2vec2-conformer": {**_SOUND, "position_embeddings_type": "relative"},
    "whisper": {"max_source_positions": 24, "num_mel_bins": 8, "max_target_positions": 48},
    "xlnet": {"d_inner": 128},
}

#: Softmaxes that are no attention: those of the kernels of a convolution.
NO_ATTENTIONS = {"convbert": 2}

TEXT = [
    *"albert bart bert bloom clip_text_model codegen convbert deberta deberta-v2 distilbert electra esm falcon".split(),
    *["falcon alibi", *"gemma gemma2 gpt2 gptj gpt_neo gpt_neox layoutlm llama longt5 m2m_100 marian mbart mistral".split()],
    *"mobilebert modernbert mpnet mpt opt pegasus phi qwen2 roberta t5 umt5 xglm xlnet".split(),
]
SOUND = "hubert wav2vec2 wav2vec2-bert wav2vec2-conformer wavlm whisper".split()
IMAGES = "beit clip_vision_model data2vec-vision deit dinov2 levit sam_vision_model segformer siglip_vision_model swin swinv2 vit".split()
_NARROW = {"depth": 2, "embed_dim": 64, "num_heads": 4}
#: Architectures, and what makes them small.
TIMM: dict[str, dict[str, Any]] = {
    **each("beit_base_patch16_224 cait_xxs24_224 deit3_small_patch16_224 eva02_tiny_patch14_224 samvit_base_patch16_224", _NARROW),
    **each("vit_base_patch16_224", _NARROW),
    **each("convit_tiny", {**_NARROW, "depth": 4}),
    **each("swin_tiny_patch4_window7_224 swinv2_tiny_window8_256", {"depths": (2, 2), "num_heads": (2, 4), "embed_dim": 64}),
    **each("tnt_s_legacy_patch16_224 xcit_nano_12_p16_224", {"depth": 2}),
    **each("coat_tiny coatnet_0_rw_224 crossvit_9_240 davit_tiny edgenext_xx_small efficientformer_l1 gcvit_xxtiny hiera_tiny_224", {}),
    **each("levit_128 maxvit_tiny_rw_224 mobilevit_xxs mvitv2_tiny nest_tiny pvt_v2_b0 tiny_vit_5m_224 twins_pcpvt_small", {}),
    **each("visformer_tiny volo_d1_224", {}),
}


def models() -> Iterator[tuple[str, Callable[[], tuple[nn.Module, dict]]]]:
    """(name, what makes a model and its inputs)."""
    for name in (*TEXT, *SOUND, *IMAGES):
        yield name, functools.partial(of_transformers, name)
    for name in TIMM:
        yield f"timm {name}", functools.partial(of_timm, name)


def of_transformers(name: str) -> tuple[nn.Module, dict]:
    import transformers

    kind = name.split(" ")[0]
    own = OF.get(name, {})
    config_class = transformers.AutoConfig.for_model(kind).__class__
    other_names = config_class.attribute_map  # by which a configuration may be given too
    known = {*vars(config_class()), *other_names}
    given = {k: v for k, v in {**SMALL, **own}.items() if k in own or (k in known and other_names.get(k) not in own)}
    config = config_class(**given)
    config._attn_implementation = "eager"
    model = transformers.AutoModel.from_config(config, attn_implementation="eager")
    ids = torch.randint(3, 150, (2, TOKENS))
    if name == "whisper":
        return model, {"input_features": torch.randn(2, 8, 48, dtype=torch.bfloat16), "decoder_input_ids": ids}
    if name == "wav2vec2-bert":
        return model, {"input_features": torch.randn(2, TOKENS, 32, dtype=torch.bfloat16)}
    if name in SOUND:
        return model, {"input_values": torch.randn(2, 400, dtype=torch.bfloat16)}
    if name in IMAGES:
        return model, {"pixel_values": torch.randn(2, 3, *[128 if name == "levit" else 32] * 2, dtype=torch.bfloat16)}
    return model, {"input_ids": ids, **({"decoder_input_ids": ids} if config.is_encoder_decoder else {})}


def of_timm(name: str) -> tuple[nn.Module, dict]:
    import timm

    timm.layers.set_fused_attn(False)
    model = timm.create_model(name, **TIMM[name])
    size = model.default_cfg["input_size"]
    return model, {"x": torch.randn(2, *size, dtype=torch.bfloat16)}


class _CountedSoftmaxes(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in (torch.ops.aten._softmax.default, torch.ops.aten._safe_softmax.default)
        return func(*args, **(kwargs or {}))


def softmaxes(make: Callable[[], tuple[nn.Module, dict]]) -> int:
    """How many an eager run takes."""
    torch.manual_seed(0)
    model, inputs = make()
    with torch.no_grad(), _CountedSoftmaxes() as counted:
        model.to(torch.bfloat16).eval()(**inputs)
    return counted.count


def found(make: Callable[[], tuple[nn.Module, dict]], training: bool) -> tuple[int, list[str]]:
    """(attentions that are replaced, why others are not)."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, inputs = make()
    model = model.to(torch.bfloat16).train(training)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    compiled = torch.compile(model, backend=backend.fuse, options=OPTIONS)
    with torch.set_grad_enabled(training):
        results = compiled(**inputs)
    if training:
        leaves = torch.utils._pytree.tree_leaves(dict(results) if isinstance(results, dict) else results)
        sum(x.float().square().mean() for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad).backward()
    report = whole_report()
    return len(report.substitutions), [r.reason for r in report.rejections]


def main(names: list[str]) -> None:
    all_found = total = 0
    for name, make in models():
        if names and name not in names:
            continue
        total += 1
        try:
            told = {way: found(make, way == "training") for way in ("inference", "training")}
            attentions = softmaxes(make) - NO_ATTENTIONS.get(name, 0)
        except Exception as error:
            print(f"{name}: failed: {''.join(traceback.format_exception_only(error)).strip()[:300]}", flush=True)
            continue
        whole = all(count >= attentions and not missed for count, missed in told.values())
        all_found += whole
        counts = ", ".join(f"{count} in {way}" for way, (count, _) in told.items())
        reasons = sorted({f"{way}: {reason}" for way, (_, missed) in told.items() for reason in missed})
        verdict = f"{'all found' if whole else 'not all found'}: of {attentions}, {counts}"
        print(f"{name}: {verdict}" + "".join(f"\n    {r}" for r in reasons), flush=True)
    print(f"{all_found} of {total}")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    main(sys.argv[1:])

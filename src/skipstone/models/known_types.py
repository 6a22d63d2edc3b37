"""Tested model types of transformers, and types that skipstone refuses, each with its reason. Any other type is derived, and
refused if the verification finds a difference."""


def _types(text: str) -> list[str]:
    return text.split()


TESTED: frozenset[str] = frozenset(
    _types("""
    afmoe apertus arcee aria_text axk1 bamba biogpt bitnet bloom codegen cohere cohere2 cohere2_moe cwm deepseek_v2
    deepseek_v3 diffllama doge dots1 emu3 ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon flex_olmo flint fuyu gemma
    gemma2 gemma3 gemma3_text gemma3n gemma3n_text gemma4 gemma4_text gemma4_unified gemma4_unified_text glm glm4
    glm4_moe glm4_moe_lite got_ocr2 gpt2 gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese gpt_oss gptj granite granite_swa
    granitemoe granitemoe_swa granitemoehybrid granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax
    internlm3 iquestcoder jais2 jetmoe kolibri1 laguna lfm2 lfm2_moe lfm3 llama llama4 llama4_text mellum mimo_v2_flash
    minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral mpt nanochat nemotron olmo olmo2 olmo3 olmo_hybrid
    olmoe opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_moe
    qwen3_next seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma xglm youtu
    """)
)
"""Model types with a row in tests/helpers. All but six have it in families.py and run in the conformance suite with every
method that they allow: greedy text against `generate`, sampled text against plain sampling. Six are wrappers of such a text
model, with rows in wrapped.py: LayerSkip's text is compared with `generate` through the wrapper."""

TESTED_AROUND_TEXT: frozenset[str] = frozenset(_types("llava mistral3 qwen2_5_vl qwen2_vl qwen3_vl"))
"""Multimodal types outside of transformers' causal model types, with a row in tests/helpers/wrapped.py. They are loaded whole
and decode text."""

UNCOMPILED: frozenset[str] = frozenset(
    _types("""
    bamba bloom gemma3n gemma3n_text gemma4 gemma4_text gemma4_unified gemma4_unified_text gpt_neo granitemoehybrid lfm2
    lfm2_moe lfm3 llama4 llama4_text mpt olmo_hybrid qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next
    """)
)
"""Tested types that engine="compiled" refuses; its `why_not` gives the reasons."""

ONLY_RECURRENT = "keeps a recurrent state in every layer; skipstone decodes such layers only next to layers with an attention"
_REASONS: dict[str, str] = {
    ONLY_RECURRENT: "falcon_mamba mamba mamba2 recurrent_gemma rwkv xlstm",
    "keeps a recurrent state next to keys and values in one layer, which skipstone does not roll back": (
        "falcon_h1 zamba zamba2 zaya"
    ),
    "keeps a recurrent state of a form that skipstone has not been tested with": "bailing_hybrid kimi_linear",
    "is a bidirectional encoder, also where its config says decoder; skipstone decodes causal models": (
        "bert bert-generation big_bird camembert data2vec-text electra ernie git megatron-bert rembert roberta "
        "roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl xmod"
    ),
    "is the decoder of an encoder-decoder; skipstone decodes decoder-only models": (
        "bart bigbird_pegasus blenderbot blenderbot-small marian mbart musicgen musicgen_melody mvp pegasus plbart "
        "prophetnet trocr whisper"
    ),
    "attends to tokens that an indexer with a cache of its own chooses": (
        "axk2 deepseek_v32 deepseek_v4 glm5_next glm_moe_dsa hy_v4 qwen4_exp qwen4_exp_text"
    ),
    "drafts for a larger model and reads its states; it has no text of its own": "gemma4_assistant gemma4_unified_assistant",
    "mixes convolutions into its layers, and their states have no positions": (
        "inkling2 inkling2_text inkling_mm_model inkling_text"
    ),
    "is an encoder-decoder; skipstone decodes decoder-only models": (
        "florence2 pix2struct pp_formulanet t5gemma2 udop vision-encoder-decoder"
    ),
    "takes no prompt without a picture; skipstone decodes text": "blip blip-2 instructblip instructblipvideo kosmos-2",
    "embeds whole texts and attends both ways": "cohere_compass cohere_compass_text",
    "attends across to images; load a text model": "idefics mllama",
    "keeps a recurrent state, and has layers that mix no tokens": "nemotron_h nemotron_h_omni",
    "has layers with different numbers of heads": "dots3_note dots3_note_text",
    "scales the attention of some layers by position, in a tensor that only its own forward makes": "beam",
    "decodes patches of bytes, not tokens": "blt",
    "computes its position biases from whole prompts and segments": "cpmant",
    "adds sinusoidal positions to its embeddings in its own forward": "ctrl",
    "has a config that transformers' own DBRX cannot be built from (attn_config lacks rope_theta)": "dbrx",
    "writes blocks by diffusion, not token by token": "diffusion_gemma",
    "reads proteins, and transformers' AutoModelForImageTextToText does not load it": "evolla",
    "runs its layers in cycles, not once each": "hrm_text",
    "keeps a recurrent state, and its own forward cannot continue it with several tokens at once": "jamba",
    "enters its embeddings in a way that skipstone does not know": "kosmos-2.5",
    "has two attention sublayers in each layer": "longcat_flash",
    "scales the states before its LM head by a ratio of two fields of its config": "minicpm3",
    "keeps a recurrent state in a cache of its own": "minimax",
    "hands its LM head over in the place of its decoder": "modernbert-decoder",
    "speaks, and its config promises windows that its masks do not have": "moshi",
    "transcribes audio; load a text model": "moss_transcribe_diarize",
    "has no KV cache in transformers": "openai-gpt",
    "attends to its prompt both ways": "paligemma",
    "switches adapters by whether it is given pictures or sound; load Phi-4-mini, its text model": "phi4_multimodal",
    "moves robots; it writes no text": "pi0",
    "attends by hashing, with a cache of its own": "reformer",
    "keeps its sublayers in separate lists, without layers": "xlm",
    "attends in permuted order": "xlnet",
}
"""Why skipstone cannot decode some model types, and the types."""
REFUSED = {kind: reason for reason, kinds in _REASONS.items() for kind in _types(kinds)}
"""Model types that skipstone cannot decode, and why."""

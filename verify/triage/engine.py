"""Symptoms of an engine that drops, lacks or cannot place weights: SGLang, vLLM, transformers."""

from __future__ import annotations

from verify.triage.symptom import PREFLIGHT, VERIFY, Symptom

_SGLANG = "ckptkit verify HF --against-sglang --tp N"
# How vLLM begins a line: its process, or the file and line that logs. SGLang begins with the time in brackets.
_VLLM = r"(?:EngineCore|VllmWorker|Worker_TP|\[\w{1,60}\.py:\d{1,5}\] Parameter).{0,400}"

ENGINE = (
    Symptom(
        "vllm-packed-dropped",
        "vLLM drops packed weights or scales",
        ("not found in params_dict",),
        "A module is packed that vLLM holds in BF16, or holds under another name. Its own parameter keeps what memory "
        "held: quantization_config, its `ignore` list and the stored tensors disagree.",
        "ckptkit lint HF --reader vllm",
        ("CK301", "CK302"),
        pattern=_VLLM + r"weight_(packed|scale|scale_inv|shape|zero_point|g_idx) not found in params_dict",
        loads=True,
    ),
    Symptom(
        "vllm-name-dropped",
        "vLLM drops a tensor whose name it does not know",
        ("not found in params_dict",),
        "The server starts and answers, while the parameter that should hold it keeps what memory held. Names of "
        "another class, or a prefix too many.",
        VERIFY,
        ("CK101", "CK104"),
        pattern=_VLLM + "not found in params_dict",
        loads=True,
    ),
    Symptom(
        "scale-dropped",
        "SGLang drops FP8 scales",
        ("not found in params_dict",),
        "SGLang's module is not quantized, so the scale has no place and FP8 codes are taken for weights, hundreds of "
        "times too large. quantization_config and the stored tensors disagree.",
        _SGLANG,
        ("CK503", "CK302"),
        pattern=r"weight_scale_inv not found in params_dict",
        loads=True,
    ),
    Symptom(
        "packed-dropped",
        "SGLang drops packed weights",
        ("not found in params_dict",),
        "A module is packed that SGLang holds in BF16, such as a router or an embedding. Its own parameter keeps zeros "
        "or noise: the `ignore` list does not protect it.",
        "ckptkit lint HF",
        ("CK301", "CK302", "CK503", "CK505"),
        pattern=r"weight_(packed|scale|shape|zero_point|g_idx) not found in params_dict",
        loads=True,
    ),
    Symptom(
        "name-dropped",
        "SGLang drops a tensor whose name it does not know",
        ("not found in params_dict",),
        "The server starts and answers, while the parameter that should hold it keeps random values.",
        _SGLANG,
        ("CK502", "CK503"),
        loads=True,
    ),
    Symptom(
        "vllm-not-initialized",
        "vLLM found no tensor for parameters of the model",
        ("weights were not initialized from checkpoint",),
        "A shard is missing, or the names in the checkpoint are not those of vLLM's class.",
        VERIFY,
        ("CK102", "CK104"),
        loads=True,
    ),
    Symptom(
        "vllm-unknown-name",
        "vLLM does not know a tensor",
        ("There is no module or parameter named",),
        "The checkpoint holds a name that the model class has no place for: a wrapper's prefix, another architecture, "
        "or packed weights of a module that is not quantized there.",
        VERIFY,
        ("CK104", "CK302"),
        loads=True,
    ),
    Symptom(
        "weight-key",
        "an engine's class has no parameter for a tensor",
        ("KeyError: '",),
        "The loader looked for the tensor's name among its parameters. Names of another class, a module that the "
        "engine holds fused (`w2_weight`, `qkv_proj`), a scale of a module that is not quantized there, or a draft "
        "layer beyond the last.",
        _SGLANG,
        ("CK501", "CK302", "CK104"),
        pattern=r"KeyError: '(?:\w{1,60}\.){1,12}\w{0,20}"
        r"(?:weight|bias|scale|zero_point|qzeros|g_idx|absmax)(?:_(?:scale|packed|shape|inv|zero_point|scale_inv|scale_2))?'",
        loads=True,
    ),
    Symptom(
        "newly-initialized",
        "transformers initialized weights anew",
        ("newly initialized",),
        "These tensors are not in the checkpoint, and the model runs with random ones.",
        VERIFY,
        ("CK104",),
        pattern=r"Some weights of .{1,200} newly initialized|were newly initialized because missing",
    ),
    Symptom(
        "weights-not-used",
        "transformers ignored stored weights",
        ("were not used when initializing",),
        "The checkpoint holds tensors that the model class has no place for: another architecture, or names of another "
        "version.",
        VERIFY,
        ("CK101", "CK104"),
    ),
    Symptom(
        "load-report-mismatch",
        "transformers initialized a tensor of another shape anew",
        ("Reinit due to size mismatch",),
        "config.json promises other sizes than the stored tensors have.",
        VERIFY,
        ("CK105",),
    ),
    Symptom(
        "heads",
        "attention heads do not divide over tensor parallel ranks",
        ("attention heads (", "num_attention_heads (", "assert self.total_num_"),
        "The tensor parallel size of the launch does not divide the heads that config.json has. The weights are not to "
        "blame, and no engine or trainer can load them so.",
        "ckptkit preflight --hf-checkpoint DIR --tp N",
        ("CK703",),
        pattern=r"attention heads \(\d{1,5}\) must be divisible by tensor parallel size"
        r"|num_attention_heads \(\d{1,5}\) must be a multiple of"
        r"|assert self\.total_num_(kv_)?heads % ",
    ),
    Symptom(
        "world-size",
        "the GPUs do not divide over the parallel sizes",
        ("orld_size", "orld size"),
        "Tensor, pipeline and context parallel sizes of the launch need another number of GPUs than it has.",
        "ckptkit preflight SCRIPT",
        ("CK722",),
        pattern=r"[Ww]orld[ _]size(?: \(|: )\d{1,6}\)? is (?:not divisible by|insufficient)",
    ),
    Symptom(
        "size-divides",
        "a size of the model does not divide over parallel ranks",
        ("is not divisible by",),
        "Heads, a width or the vocabulary of config.json cannot be cut into so many ranks.",
        "ckptkit preflight --hf-checkpoint DIR --tp N",
        ("CK703",),
        pattern=r"AssertionError: \d{1,9} is not divisible by \d{1,9}",
        near=(", in ensure_divisibility", ", in divide"),
    ),
    Symptom(
        "tile",
        "an INT4 matrix does not divide into kernel tiles",
        ("is not divisible by",),
        "The matrix, cut for this tensor parallel size, is not a multiple of the tile or group. Use a smaller size, or "
        "leave the module unpacked.",
        "ckptkit quantize SRC DST --tp N --dry-run",
        ("CK307",),
        pattern=r"(size_[nk] = \d{1,9},? is not divisible by (tile_|num_groups)"
        r"|partition = \d{1,9} is not divisible by {1,2}(min_|group_size|pack_factor))",
    ),
    Symptom(
        "quant-block",
        "an FP8 matrix does not divide into blocks",
        ("is not divisible by weight quantization block",),
        "The matrix, cut for this tensor parallel size, is not a multiple of the block of its scales.",
        "ckptkit preflight --hf-checkpoint DIR --tp N",
        ("CK703",),
    ),
    Symptom(
        "shards-missing",
        "files that the index names are not there",
        ("file(s) from index",),
        "The download or conversion is not complete.",
        "ckptkit inspect HF",
        ("CK102", "CK103"),
        pattern=r"Missing \d{1,9} file\(s\) from index",
    ),
    Symptom(
        "no-weights",
        "the engine finds no weights",
        ("Cannot find any model weights with", "No model weights found in:"),
        "The directory has a config and no safetensors: a Megatron directory, or a download that stopped.",
        "ckptkit preflight --hf-checkpoint DIR",
        ("CK102", "CK714"),
    ),
    Symptom(
        "header-damaged",
        "a safetensors file is cut short or damaged",
        ("Error while deserializing header",),
        "A download or copy stopped; or the file is a Git LFS pointer.",
        "ckptkit inspect HF",
        ("CK102",),
    ),
    Symptom(
        "draft-class",
        "the engine loads a model as a draft that is not one",
        (
            "has no attribute 'set_embed",
            "has no attribute 'get_embed_and_head'",
            "has no attribute 'set_eagle3_layers_to_capture'",
            "has no attribute 'hot_token_id'",
        ),
        "Speculative decoding without the path of a draft takes the served checkpoint itself, which is a draft only "
        "where it has multi-token prediction layers and SGLang a class for them.",
        "ckptkit preflight SCRIPT",
        ("CK745", "CK508"),
    ),
    Symptom(
        "draft-rejected",
        "no draft token is ever accepted",
        ("accept len: 1.00",),
        "The draft layers hold nothing, old weights or another model's: not stored, dropped by the engine, or not "
        "updated. The answers are right, and slower than without a draft.",
        _SGLANG,
        ("CK502", "CK503", "CK508", "CK512", "CK513"),
        pattern=r"accept len: 1\.00(?!\d)",
    ),
    Symptom(
        "sync-differs",
        "the engine's weights differ from the trainer's after an update",
        ("check tensor equality failed",),
        "SGLang's weight checker found tensors that are not those it loaded. Names that it dropped, another INT4 grid, "
        "or a mapping of the trainer.",
        VERIFY,
        ("CK202", "CK305", "CK503"),
    ),
    Symptom(
        "sync-refused",
        "the engine refused a weight update",
        ("weight sync failed on rollout engine",),
        "The engine keeps its old weights. Names, shapes or versions do not fit.",
        PREFLIGHT,
        ("CK503", "CK715"),
    ),
    Symptom(
        "update-failed",
        "SGLang could not take a weight update",
        ("Failed to update weights:", "Failed to update parameter online:"),
        "Names or shapes of the update do not fit the model that the engine serves, such as INT4 sent to a BF16 "
        "directory. The engine keeps old weights, or a part of the new.",
        PREFLIGHT,
        ("CK503", "CK715"),
    ),
)

"""Symptoms of an engine that drops, lacks or cannot lay out weights, and of its tokenizer: SGLang, transformers."""

from __future__ import annotations

from verify.triage.symptom import PREFLIGHT, VERIFY, Symptom

_SGLANG = "ckptkit verify HF --against-sglang --tp N"

ENGINE = (
    Symptom(
        "scale-dropped",
        "SGLang drops FP8 scales",
        ("not found in params_dict",),
        "SGLang's module is not quantized, so the scale has no place and FP8 codes are taken for weights, hundreds of "
        "times too large. quantization_config and the stored tensors disagree.",
        _SGLANG,
        ("CK503", "CK302"),
        pattern=r"weight_scale_inv not found in params_dict",
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
    ),
    Symptom(
        "name-dropped",
        "SGLang drops a tensor whose name it does not know",
        ("not found in params_dict",),
        "The server starts and answers, while the parameter that should hold it keeps random values.",
        _SGLANG,
        ("CK502", "CK503"),
    ),
    Symptom(
        "vllm-not-initialized",
        "vLLM found no tensor for parameters of the model",
        ("weights were not initialized from checkpoint",),
        "A shard is missing, or the names in the checkpoint are not those of vLLM's class.",
        VERIFY,
        ("CK102", "CK104"),
    ),
    Symptom(
        "vllm-unknown-name",
        "vLLM does not know a stored tensor",
        ("There is no module or parameter named",),
        "The checkpoint holds a name that the model class has no place for: a wrapper's prefix, another architecture, "
        "or packed weights of a module that is not quantized there.",
        VERIFY,
        ("CK104", "CK302"),
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
        "tile",
        "an INT4 matrix does not divide into kernel tiles",
        ("is not divisible by",),
        "The matrix, cut for this tensor parallel size, is no multiple of the tile or group. Use a smaller size, or "
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
        "The matrix, cut for this tensor parallel size, is no multiple of the block of its scales.",
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
    Symptom(
        "rope-keys",
        "rotary settings are not understood",
        ("Unrecognized keys in `rope_",),
        "The config spells rotary settings for another version of transformers. Version 4 does not read "
        "`rope_parameters` and takes a base of 10000.",
        "ckptkit preflight --hf-checkpoint DIR",
        ("CK704",),
    ),
    Symptom(
        "rope-missing",
        "rotary settings are missing",
        ("rope_",),
        "The config has no rotary settings where this version of transformers looks for them: v4 reads `rope_theta` "
        "and `rope_scaling`, v5 `rope_parameters`.",
        "ckptkit preflight --hf-checkpoint DIR",
        ("CK704",),
        pattern=r"(KeyError: |has no attribute )'rope_(parameters|theta|scaling)'",
    ),
    Symptom(
        "architecture-unknown",
        "transformers does not know the model type",
        ("does not recognize this architecture",),
        "transformers is older than the model, or config.json belongs to another one.",
        "ckptkit inspect HF",
        ("CK101",),
    ),
    Symptom(
        "chat-template-missing",
        "the tokenizer has no chat template",
        ("tokenizer.chat_template is not set", "No HuggingFace chat template found"),
        "Prompts are built without the template that the model was trained with: a base model, or a conversion that "
        "left chat_template.jinja behind.",
        VERIFY,
        ("CK708", "CK720"),
    ),
    Symptom(
        "tokenizer-missing",
        "the tokenizer cannot be loaded",
        ("Can't load tokenizer for", "Couldn't instantiate the backend tokenizer"),
        "Tokenizer files are not beside the weights.",
        PREFLIGHT,
        ("CK716", "CK720"),
    ),
)

"""Symptoms of a config or side file that a reader refuses: transformers, compressed-tensors, tokenizers."""

from __future__ import annotations

from verify.triage.symptom import PREFLIGHT, VERIFY, Symptom

CONFIG = (
    Symptom(
        "activation-order",
        "compressed-tensors refuses the activation ordering of quantization_config",
        ("activation ordering", "Consider using actorder"),
        "`actorder` of a scheme does not go with its strategy, for the release of compressed-tensors that the engine "
        "pins. Nothing is loaded; another engine may take the same checkpoint.",
        "ckptkit lint HF",
        ("CK302",),
        pattern=r"to apply (group )?activation ordering|Consider using actorder",
    ),
    Symptom(
        "schemes-differ",
        "modules that the engine holds in one are quantized differently",
        ("Found different quantization schemes for ",),
        "`ignore` or the targets of quantization_config cover some of q, k and v, or of gate and up, and not the rest.",
        "ckptkit lint HF",
        ("CK302", "CK306"),
    ),
    Symptom(
        "no-target",
        "no group of quantization_config is for a module",
        ("Unable to find matching target for ",),
        "The engine's name of the module, such as the fused qkv_proj, is in no `targets` and not in `ignore`.",
        "ckptkit lint HF",
        ("CK302",),
    ),
    Symptom(
        "sparse24",
        "the engine has no kernel for the packed format",
        ("CompressedTensorsW4A16Sparse24", "attempting to use a Sparse24 model"),
        "SGLang takes INT4 of `format` pack-quantized alone: this one is marlin-24 or another, or a group of the "
        "config is not what the format says.",
        "ckptkit lint HF",
        ("CK302",),
    ),
    Symptom(
        "file-not-there",
        "a file that transformers wants is not in the directory",
        ("does not appear to have ",),
        "Weights, tokenizer, processor or the model's own code were left behind by a conversion, or a download is not "
        "whole. The path may also be that of a Megatron checkpoint.",
        "ckptkit preflight --hf-checkpoint DIR",
        ("CK102", "CK714", "CK720"),
        pattern=r"does not appear to have (a file|files) named \(?'?(?!generation_config)",
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

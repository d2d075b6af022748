"""Symptoms of a trainer that loads nothing, something else, or only a part: Megatron, slime, miles, torch."""

from __future__ import annotations

from verify.triage.symptom import PREFLIGHT, VERIFY, Symptom

LOADING = (
    Symptom(
        "tracker-missing",
        "Megatron found no tracker",
        ("could not find the metadata file", "latest_checkpointed_iteration.txt'"),
        "The directory has no latest_checkpointed_iteration.txt, so Megatron looks for no checkpoint in it. An "
        "iteration's directory was given instead of its parent, or a save did not finish.",
        PREFLIGHT,
        ("CK711", "CK712"),
        pattern="could not find the metadata file|No such file or directory: '.{0,400}iteration\\.txt'",
    ),
    Symptom(
        "random-weights",
        "Megatron starts from random weights",
        ("will not load any checkpoints and will start from random",),
        "Nothing was loaded, and training goes on. The first rollout is garbage.",
        PREFLIGHT,
        ("CK711", "CK712"),
    ),
    Symptom(
        "load-empty",
        "--load or --ref-load is absent or empty",
        ("does not exist or is an empty directory",),
        "The trainer stops because there is no checkpoint at the path. A relative path, or one that only the head node "
        "has, is often the reason.",
        PREFLIGHT,
        ("CK711", "CK712"),
    ),
    Symptom(
        "load-none",
        "--load is empty, and training starts from initial weights",
        ("starting from model_provider-initialized weights",),
        "miles found no checkpoint, and goes on without one.",
        PREFLIGHT,
        ("CK711",),
    ),
    Symptom(
        "tracker-invalid",
        "the tracker names no iteration",
        ("Invalid metadata file",),
        "latest_checkpointed_iteration.txt must hold a number or `release`.",
        PREFLIGHT,
        ("CK111", "CK711"),
    ),
    Symptom(
        "arguments-differ",
        "launch arguments and checkpoint describe different models",
        ("value from checkpoint (",),
        "An argument stored in the checkpoint is not the one of the launch script.",
        "ckptkit inspect CKPT --megatron-args",
        ("CK701",),
        pattern=r"value from checkpoint \(.{0,200}\) is not equal",
    ),
    Symptom(
        "config-differs",
        "launch arguments and config.json describe different models",
        ("hf_validate_args failed", " in hf config "),
        "slime and miles compare sizes, rope base and norm epsilon of --hf-checkpoint with the model arguments.",
        "ckptkit inspect HF --megatron-args",
        ("CK718", "CK701"),
        pattern=r"hf_validate_args failed| in hf config .{1,80} is not equal to \w{1,60} ",
    ),
    Symptom(
        "missing-keys",
        "the model lacks tensors that the checkpoint holds",
        ("are missing in the provided sharded state dict",),
        "Megatron's model has fewer layers, experts or biases than the checkpoint: a model argument is wrong, or an "
        "MTP layer is not trained.",
        "ckptkit verify CKPT --against-megatron --tp N --pp N",
        ("CK401", "CK114"),
    ),
    Symptom(
        "unexpected-keys",
        "the checkpoint lacks tensors that the model wants",
        ("not found in the checkpoint) encountered in the provided sharded state dict",),
        "These parameters stay as they were initialized. Names of another version or spec, or a lost layer.",
        "ckptkit verify CKPT --against-megatron --tp N --pp N",
        ("CK401", "CK115", "CK116"),
    ),
    Symptom(
        "key-not-stored",
        "a parameter of the model is not in the checkpoint",
        ("from model not in state dict",),
        "A layer, a bias or _extra_state is not stored. Names of another version or spec look the same.",
        "ckptkit verify CKPT --against-megatron --tp N --pp N",
        ("CK401", "CK115", "CK116"),
    ),
    Symptom(
        "global-shape",
        "a stored tensor has another size than the model's",
        ("Global shape mismatch for loaded",),
        "Vocabulary padding, heads or experts of the launch arguments are not those of the checkpoint.",
        "ckptkit verify CKPT --against-megatron --tp N --pp N",
        ("CK105", "CK401", "CK701"),
    ),
    Symptom(
        "size-mismatch",
        "a parameter has another shape than its tensor",
        ("size mismatch for ",),
        "Config or parallel sizes do not fit the weights. For a legacy checkpoint the parallel sizes must be those of "
        "the save; torch_dist takes any.",
        PREFLIGHT,
        ("CK105", "CK703"),
        pattern=r"size mismatch for [^ ]{1,300}: copying a param with shape",
        loads=True,
    ),
    Symptom(
        "parallel-mismatch",
        "the checkpoint was saved with other parallel sizes",
        ("mismatch after resume",),
        "Megatron keeps weights, and drops optimizer or random states that do not fit the new sizes.",
        "ckptkit inspect CKPT",
        ("CK703",),
        pattern=r"\(TP, PP\) mismatch after resume",
    ),
    Symptom(
        "state-dict-keys",
        "a strict load found missing or unknown keys",
        ("key(s) in state_dict:",),
        "torch refused a state dict. A lenient retry (strict=False) hides this, and the parameters keep their initial "
        "values.",
        VERIFY,
        ("CK104", "CK401"),
        pattern=r"(Missing|Unexpected) key\(s\) in state_dict:",
    ),
    Symptom(
        "distributed-key",
        "torch's distributed checkpoint lacks a key",
        ("Missing key in checkpoint state_dict",),
        "A parameter of the model is stored under no name of this checkpoint.",
        "ckptkit verify CKPT --against-megatron --tp N --pp N",
        ("CK111", "CK114", "CK401"),
    ),
    Symptom(
        "chunk-not-stored",
        ".metadata names a piece of a tensor that no file holds",
        ("KeyError: MetadataIndex(",),
        "torch looks up where each piece lies. The ranks' parts of .metadata were not gathered whole, a save was "
        "interrupted, or two saves went into one directory.",
        "ckptkit verify CKPT",
        ("CK111",),
    ),
    Symptom(
        "metadata-unread",
        "torch could not read .metadata",
        ("AssertionError: metadata is None", "assert metadata is not None"),
        "torch hides why: the file is not there (on this node, if storage is not shared), is cut short, or the path is "
        "not that of a distributed checkpoint.",
        "ckptkit verify CKPT",
        ("CK111",),
    ),
    Symptom(
        "flat-shape",
        "the checkpoint was not saved by an optimizer that shards flat",
        ("Cannot find global shape metadata for ",),
        "The job cuts parameters or optimizer states flat over data parallel ranks (Megatron-FSDP, a distributed "
        "optimizer), and .metadata has no shape for that: another sharding saved it, or it is a conversion, which has "
        "no optimizer states (--no-load-optim, --finetune).",
        "ckptkit inspect CKPT",
        ("CK111",),
    ),
    Symptom(
        "async-tracker",
        "verl leaves the tracker to its checkpoint manager",
        ("skip write latest_checkpointed_iteration.txt when async_save",),
        "With Megatron the tracker is written when the asynchronous save has ended. With FSDP nobody writes it, and "
        "the next run starts from step 0. Look whether it is there.",
        PREFLIGHT,
        ("CK711",),
    ),
    Symptom(
        "export-incomplete",
        "an export left tensors out",
        ("tensors were yielded but not saved",),
        "Megatron-Bridge writes a shard only when every tensor of the release's shard is there. One tensor less, such "
        "as those of an MTP layer, and the shard is not written.",
        "ckptkit verify HF --source RELEASE",
        ("CK102", "CK104", "CK108"),
    ),
    Symptom(
        "unknown-name",
        "slime's or miles' converter does not know a parameter",
        ("arameter name: ",),
        "The trainer cannot send this parameter to the engine: the family has no rule for it there.",
        "ckptkit convert CKPT OUT --dry-run",
        ("CK101", "CK104"),
        pattern=r"Unknown (expert |shared expert )?parameter name: ",
    ),
)

"""Symptoms of machines and networks, most of them effects of something earlier: CUDA, the host, NCCL, Ray."""

from __future__ import annotations

from verify.triage.symptom import NO_CHECKPOINT, Symptom

MACHINE = (
    Symptom(
        "host-oom",
        "the host ran out of memory",
        (
            "oom-kill",
            "Out of memory: Killed process",
            "killed due to the node running low on memory",
            "OOMKilled",
            "OutOfMemoryError: Task was killed",
        ),
        "A process was killed by the system. Converters that build the whole model in memory do this; ckptkit holds a "
        "few tensors.",
        "ckptkit convert SRC DST --dry-run",
    ),
    Symptom(
        "cuda-oom-loading",
        "a GPU ran out of memory while weights were loaded or converted",
        ("CUDA out of memory", "CUDA error: out of memory"),
        "In the traceback above it a function loads weights. The parallel sizes leave a rank too "
        "much, or the engine still holds its own.",
        "ckptkit inspect CKPT",
        near=(
            ", in load_weights",
            ", in load_model",
            ", in load_checkpoint",
            ", in load_state_dict",
            ", in load_hf_weights",
            ", in process_weights_after_loading",
        ),
    ),
    Symptom(
        "cuda-oom",
        "a GPU ran out of memory",
        ("CUDA out of memory", "CUDA error: out of memory"),
        "If it happens while weights are loaded, the parallel sizes leave a rank too much (`ckptkit inspect` says how "
        "many bytes there are). In the second step of a colocated job the engine's static memory is too large. "
        "Otherwise it is about batch sizes.",
        "ckptkit inspect CKPT",
    ),
    Symptom(
        "sglang-oom",
        "SGLang has no memory left for its cache",
        ("Not enough memory. Please try to increase --mem-fraction-static",),
        "The weights fill the share of the GPU that SGLang may use. They may be larger than meant, such as BF16 in "
        "place of INT4.",
        "ckptkit inspect HF",
    ),
    Symptom(
        "illegal-access",
        "a CUDA kernel read or wrote outside its memory",
        ("an illegal memory access was encountered",),
        "Often memory that ran out, or a mismatch of draft and main model in a CUDA graph. It is rarely the "
        "checkpoint.",
        NO_CHECKPOINT,
    ),
    Symptom(
        "compile-cache",
        "the cache of torch's compiler is damaged",
        ("JSONDecodeError",),
        "Set TORCHINDUCTOR_FORCE_DISABLE_CACHES=1. It is not a file of the checkpoint.",
        NO_CHECKPOINT,
        pattern=r"inductor.{0,300}JSONDecodeError|JSONDecodeError.{0,300}inductor",
    ),
    Symptom(
        "nccl-timeout",
        "a collective operation timed out",
        ("Watchdog caught collective operation timeout",),
        "A rank did not take part: it died, or does other work. Look for the first error of any rank before this time. "
        "It is not a checkpoint matter.",
        NO_CHECKPOINT,
        effect=True,
    ),
    Symptom(
        "nccl-error",
        "NCCL failed",
        ("NCCL error", "ncclSystemError", "ncclRemoteError", "ncclInternalError", "ncclUnhandledCudaError"),
        "A connection or a device failed, or another rank died first. It is not a checkpoint matter.",
        NO_CHECKPOINT,
        effect=True,
    ),
    Symptom(
        "ray-actor-died",
        "a Ray actor died",
        ("actor died",),
        "Ray reports the death, not the reason. Look for the first error above, and in the worker's own log.",
        NO_CHECKPOINT,
        effect=True,
    ),
    Symptom(
        "ray-worker-died",
        "a Ray worker died",
        ("worker died unexpectedly",),
        "Ray reports the death, not the reason. Look for the first error above, and whether the host ran out of "
        "memory.",
        NO_CHECKPOINT,
        effect=True,
    ),
    Symptom(
        "sglang-child-died",
        "a process of SGLang died",
        ("It usually means one child failed",),
        "SGLang stops because a scheduler did. Its own traceback stands above.",
        NO_CHECKPOINT,
        effect=True,
    ),
)

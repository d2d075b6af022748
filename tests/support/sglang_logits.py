"""Logits by SGLang's own forward pass on a GPU: `python -m support.sglang_logits MODEL OUT`.

A prompt ends at every position, since SGLang gives the logits of a prompt's last token.
"""

import sys
from importlib import import_module

import torch
from families.case import tokens

# Settings of every engine that tests start.
PLAIN = {
    "skip_tokenizer_init": True,
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
}


def main():
    from sglang.srt.server_args import PortArgs, ServerArgs

    bench = import_module("sglang.benchmark.one_batch")
    bench.get_tokenizer = lambda *_, **__: None
    args = ServerArgs(
        model_path=sys.argv[1],
        **PLAIN,
        disable_radix_cache=True,
        mem_fraction_static=0.3,
        max_total_tokens=4096,
        max_running_requests=64,
    )
    bench._set_envs_and_config(args)
    for name in ("initialize_moe_config", "initialize_fp8_gemm_config", "initialize_fp4_gemm_config"):
        getattr(bench, name)(args)
    runner, _ = bench.load_model(args, PortArgs.init_new(args), 0, 0)
    prompts = [row[:length].tolist() for row in tokens() for length in range(1, row.numel() + 1)]
    _, logits, _ = runner.extend(bench.prepare_synthetic_inputs_for_latency_test(len(prompts), 0, prompts))
    torch.save(logits.float().cpu().view(*tokens().shape, -1), sys.argv[2])


if __name__ == "__main__":
    main()

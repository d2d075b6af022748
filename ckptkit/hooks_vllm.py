"""Reports the weights of vLLM's ranks: `vllm serve --worker-extension-cls ckptkit.hooks_vllm.WeightReader`.

vLLM 0.32 and later report them over HTTP without this. Of ckptkit's requirements, it only needs torch.
"""

from __future__ import annotations

from typing import Any

from ckptkit.verify.weight_sync.vllm import checksums_of, device_sum


class WeightReader:
    """Answers `collective_rpc` like vLLM 0.33's `compute_weight_checksums` and `/server_info`; also as a base class."""

    vllm_config: Any
    model_runner: Any

    def ckptkit_setup(self) -> dict[str, Any]:
        """The parts of the engine's config that determine the layout of weights."""
        parts = ("parallel_config", "model_config", "kernel_config")
        return {part: _plain(getattr(self.vllm_config, part, None)) for part in parts}

    def ckptkit_weights(self) -> dict[str, str]:
        """The checksum of every parameter of this rank, computed on its device."""
        from vllm.distributed import parallel_state

        pcp = getattr(parallel_state, "get_pcp_group", None)
        ranks = {
            "dp": getattr(self.vllm_config.parallel_config, "data_parallel_index", 0),
            "pp": parallel_state.get_pp_group().rank_in_group,
            "pcp": pcp().rank_in_group if pcp else 0,
            "tp": parallel_state.get_tp_group().rank_in_group,
        }
        prefix = "".join(f"{name}{rank}:" for name, rank in ranks.items())
        sums = {prefix + name: device_sum(one) for name, one in self.model_runner.get_model().named_parameters()}
        return dict(zip(sums, checksums_of(list(sums.values())), strict=True))


def _plain(config: Any) -> dict[str, Any]:
    """The fields of a config: text, numbers and flags unchanged, other values as text."""
    fields = {name: value for name, value in vars(config or object).items() if not name.startswith("_")}
    return {name: one if isinstance(one, bool | int | str | None) else str(one) for name, one in fields.items()}

"""LoRA adapters as Megatron-Bridge saves them in torch_dist are refused in words that say what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import models
from support.fixture_types import CopyOf, PathOf

from ckptkit.app.api import convert, inspect
from ckptkit.core.errors import UnsupportedError
from verify.run import verify

LAYER = "decoder.layers.3.self_attention"


def with_adapters(path: Path, alone: bool) -> Path:
    """A pair of `linear_proj`, and one of a part of `linear_qkv`; `alone`: as a run saves adapters, with no model."""
    names = [f"{LAYER}.linear_proj.adapter.linear_in.weight", f"{LAYER}.linear_proj.adapter.linear_out.weight"]
    names += [f"{LAYER}.linear_qkv.adapter.adapter_q.linear_{one}.weight" for one in ("in", "out")]

    def change(metadata: Any) -> None:
        key = f"{LAYER}.linear_proj.weight"
        entry = metadata.state_dict_metadata[key]
        index = next(index for index in metadata.storage_data if index.fqn == key)
        stored = metadata.storage_data[index]
        if alone:
            metadata.state_dict_metadata.clear()
            metadata.storage_data.clear()
        for name in names:
            metadata.state_dict_metadata[name] = entry
            metadata.storage_data[type(index)(name, index.offset, 0)] = stored

    models.edit_metadata(path / "release", change)
    return path


@pytest.mark.parametrize(("alone", "words"), [(True, "and no model"), (False, "beside the weights")])
def test_convert_names_the_pairs_and_the_way_to_peft(
    alone: bool, words: str, converted: PathOf, copy_of: CopyOf, tmp_path: Path
) -> None:
    path = with_adapters(copy_of(converted("qwen2-tied")), alone)
    with pytest.raises(UnsupportedError) as refused:
        convert(path, tmp_path / "out")
    pairs = f"{LAYER}.linear_proj.adapter.linear_in.weight, {LAYER}.linear_qkv.adapter.adapter_q.linear_in.weight"
    assert refused.value.message.endswith(
        f"holds LoRA adapters of Megatron {words}, 2 pairs ({pairs}), which are not converted"
    )
    assert "AutoBridge.save_hf_adapter" in str(refused.value.hint)
    assert not (tmp_path / "out").exists()


def test_verify_names_them_and_inspect_lists_them(converted: PathOf, copy_of: CopyOf) -> None:
    path = with_adapters(copy_of(converted("qwen2-tied")), alone=True)
    found = [one for one in verify(path).findings if one.code == "CK110"]
    assert [one.count for one in found] == [4]
    assert any(".adapter.linear_in.weight" in name for name in inspect(path)["names"])

"""Derives the configuration of a model's tiny twin: the same class with narrow layers, a small vocabulary and small images."""

from __future__ import annotations

from typing import Any

HEADS, HEAD_WIDTH, VOCABULARY, EXPERTS, PATCH, PATCHES_A_SIDE = 4, 16, 512, 4, 8, 4
MULTIPLE = 16  # the width of an MLP in a tiny twin is a multiple of this number


def tiny(made: Any) -> dict[str, Any]:
    """The keys of a configuration that change for the tiny twin, with their new values.

    made: the configuration as an object of transformers. Keys that it does not have, or whose value is not a number, are not
    changed. The twin of an unusual model may therefore be invalid; the caller must try to build it.
    """
    found: dict[str, Any] = {}

    def number(name: str) -> int:
        value = getattr(made, name, None)
        return value if type(value) is int and value > 0 else 0

    width, heads, pairs = number("hidden_size"), number("num_attention_heads"), number("num_key_value_heads")
    if width and heads:
        of_twin = min(heads, HEADS)
        found |= {"num_attention_heads": of_twin, "hidden_size": of_twin * HEAD_WIDTH}
        if pairs:
            shared = max(1, of_twin * pairs // heads)
            found["num_key_value_heads"] = shared if of_twin % shared == 0 else of_twin
        if number("head_dim"):
            found["head_dim"] = HEAD_WIDTH
        for name in ("intermediate_size", "moe_intermediate_size"):
            if number(name):
                found[name] = max(1, number(name) * of_twin * HEAD_WIDTH // (width * MULTIPLE)) * MULTIPLE
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if number(name):
            found[name] = min(number(name), EXPERTS)
    if number("num_experts_per_tok"):
        found["num_experts_per_tok"] = min(number("num_experts_per_tok"), EXPERTS // 2)
    if number("vocab_size"):
        found["vocab_size"] = min(number("vocab_size"), VOCABULARY)
        found |= {name: 0 for name in made.to_dict() if name.endswith("_token_id") and number(name) >= found["vocab_size"]}
    if number("patch_size") and number("image_size"):
        found["patch_size"] = min(number("patch_size"), PATCH)
        found["image_size"] = found["patch_size"] * PATCHES_A_SIDE
    depths = getattr(made, "depths", None)
    if isinstance(depths, list):
        found["depths"] = [min(depth, 1) if type(depth) is int else depth for depth in depths]
    spelled = {made.attribute_map.get(name, name): value for name, value in found.items()}
    return {name: value for name, value in spelled.items() if hasattr(made, name)}

"""What a ``config.json`` says of recurrent layers: which they are, and how large the state of one is.

Follows vLLM 0.32's shapes (``MambaStateShapeCalculator``) and dtypes; a test compares them. Called by ``model_config``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from tiered_kv.errors import ConfigError

INTERVAL: Final = 4
"""Every so manieth layer of a model with gated delta nets attends, where the file does not list ``layer_types``."""

DELTA_NETS: Final = frozenset({"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"})
MAMBA_2: Final = frozenset({"granitemoehybrid"})
RECURRENT_TYPES: Final = DELTA_NETS | MAMBA_2
"""Types whose states are worked out here; of others ``tiered-kv ls`` tells the size once one is stored."""

ATTENDS: Final = frozenset({"full_attention", "attention"})


@dataclass(frozen=True, slots=True)
class RecurrentLayers:
    """The layers of a model that keep a state and no KV per token.

    Attributes:
        kind: In words.
        layers: How many there are.
        conv_rows: Tokens that the convolution looks back.
        conv_values: Values of one such row that are split over the ranks.
        group_values: Values of a row per group; vLLM gives each rank whole groups, at least one.
        groups: Groups.
        heads: Heads of the state, which are split over the ranks.
        head_values: Values of one head's state.
        conv_bytes, head_bytes: Bytes of one value of either.
    """

    kind: str
    layers: int
    conv_rows: int
    conv_values: int
    group_values: int
    groups: int
    heads: int
    head_values: int
    conv_bytes: int
    head_bytes: int

    def layer_bytes(self, tp: int) -> int:
        """Bytes of one layer's state on one rank.

        Raises:
            ConfigError: vLLM could not split it over so many ranks.
        """
        groups = self.groups if self.groups % tp == 0 else tp
        row = self.conv_values + groups * self.group_values
        if self.heads % tp or row % tp:
            raise ConfigError(f"vLLM splits the heads of recurrent layers evenly. heads={self.heads} tp={tp}")
        return self.conv_rows * row // tp * self.conv_bytes + self.heads // tp * self.head_values * self.head_bytes


def recurrent_layers(
    fields: Mapping[str, Any], model_type: str, kinds: list[str], dtype_bytes: int
) -> RecurrentLayers | None:
    """The recurrent layers among a model's; None where all attend.

    Args:
        kinds: Of each layer, as :func:`layer_kinds` gives them.
        dtype_bytes: Of the model's dtype.
    """
    count = sum(kind not in ATTENDS for kind in kinds)
    if not count:
        return None
    if model_type in DELTA_NETS:
        keys = fields["linear_num_key_heads"] * fields["linear_key_head_dim"]
        values = fields["linear_num_value_heads"] * fields["linear_value_head_dim"]
        is_single = model_type != "qwen3_next" and fields.get("mamba_ssm_dtype") == "float32"
        return RecurrentLayers(
            kind="gated delta nets",
            layers=count,
            conv_rows=fields["linear_conv_kernel_dim"] - 1,
            conv_values=2 * keys + values,
            group_values=0,
            groups=0,
            heads=fields["linear_num_value_heads"],
            head_values=fields["linear_value_head_dim"] * fields["linear_key_head_dim"],
            conv_bytes=dtype_bytes,
            head_bytes=4 if is_single else dtype_bytes,
        )
    inner = fields["mamba_expand"] * fields["hidden_size"]
    return RecurrentLayers(
        kind="Mamba 2",
        layers=count,
        conv_rows=fields["mamba_d_conv"] - 1,
        conv_values=inner,
        group_values=2 * fields["mamba_d_state"],
        groups=fields["mamba_n_groups"],
        heads=fields["mamba_n_heads"],
        head_values=inner // fields["mamba_n_heads"] * fields["mamba_d_state"],
        conv_bytes=dtype_bytes,
        head_bytes=dtype_bytes,
    )


def layer_kinds(fields: Mapping[str, Any], layers: int) -> list[str]:
    """What each layer is, by ``layer_types`` or the interval of those that attend."""
    kinds = fields.get("layer_types")
    if isinstance(kinds, list) and len(kinds) == layers:
        return [str(kind) for kind in kinds]
    every = fields.get("full_attention_interval") or INTERVAL
    return ["full_attention" if (number + 1) % every == 0 else "linear_attention" for number in range(layers)]


def parts_of_state(attending: int, recurrent: int) -> int:
    """Groups of recurrent layers that vLLM makes, each as large as that of the layers that attend."""
    least, most = sorted((attending, recurrent))
    group = most if most < 1.5 * least else least
    return -(-recurrent // group)

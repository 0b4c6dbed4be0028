"""The Mamba-2 mixer: Megatron's parameters, names and sharding, with our own scan or mamba-ssm's kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.mamba_context_parallel import MambaContextParallel
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor, nn

from models.convolution import causal_convolution
from models.norm import ACTIVATION_DTYPE, GroupRMSNorm, NormFunction, parameter_device
from models.scan import chunked_scan


@dataclass(frozen=True)
class MambaWeights:
    """What the core of a mixer needs on this rank: its slices of the parameters (FP32) and the sizes.

    Attributes:
        conv_weight, conv_bias: [channels, 1, taps] and [channels], channels being x, B and C.
        dt_bias, A_log, D: [heads].
        head_dim, state_dim, num_groups, chunk_size: sizes of the scan.
    """

    conv_weight: Tensor
    conv_bias: Tensor
    dt_bias: Tensor
    A_log: Tensor
    D: Tensor
    head_dim: int
    state_dim: int
    num_groups: int
    chunk_size: int

    @property
    def num_heads(self) -> int:
        """Heads on this rank."""
        return self.D.shape[0]

    @property
    def inner_size(self) -> int:
        """Width of z, of x and of the result."""
        return self.num_heads * self.head_dim

    @property
    def split_sizes(self) -> tuple[int, int, int]:
        """Widths of z, of x with B and C, and of dt in what in_proj gives."""
        return self.inner_size, self.conv_bias.shape[0], self.num_heads

    @property
    def convolved_sizes(self) -> tuple[int, int, int]:
        """Widths of x, B and C."""
        group_width = self.num_groups * self.state_dim
        return self.inner_size, group_width, group_width


# Elements of the decay matrices [tokens, heads, chunk] that a CPU handles at once.
CPU_DECAY_ELEMENTS = 2**20

MixerCore = Callable[[Tensor, MambaWeights, Tensor | None], Tensor]


@dataclass(frozen=True)
class MambaKernels:
    """What runs between in_proj and out_proj, and the line that says so."""

    core: MixerCore
    description: str


def torch_core(projected: Tensor, weights: MambaWeights, documents: Tensor | None = None) -> Tensor:
    """Convolution, scan and gate in plain torch, FP32 inside.

    Args:
        projected: [s, b, z + x + B + C + dt] from in_proj, BF16.
        weights: the rank's parameters.
        documents: [b, s] int32, the number of each token's document in its row, never falling: neither convolution nor
            state reaches over a border. None: one document a row.

    Returns:
        [s, b, d_inner], BF16.
    """
    if projected.device.type != "cpu":
        return _convolve_scan_gate(projected, weights, documents)
    # A few sequences at a time: the decay matrices of the scan then stay in a core's cache.
    sequences = max(1, CPU_DECAY_ELEMENTS // (projected.shape[0] * weights.num_heads * weights.chunk_size))
    pieces = projected.split(sequences, dim=1)
    rows = [None] * len(pieces) if documents is None else documents.split(sequences)
    done = [_convolve_scan_gate(piece, weights, row) for piece, row in zip(pieces, rows, strict=True)]
    return torch.cat(done, dim=1)


def _convolve_scan_gate(projected: Tensor, weights: MambaWeights, documents: Tensor | None) -> Tensor:
    """[s, b, z + x + B + C + dt] BF16 -> scan(silu(convolution(x, B, C)), softplus(dt + dt_bias)) * silu(z), BF16."""
    z, xbc, dt = projected.float().split(weights.split_sizes, dim=-1)
    xbc = F.silu(causal_convolution(xbc, weights.conv_weight, weights.conv_bias, documents))
    x, B, C = xbc.split(weights.convolved_sizes, dim=-1)
    y = chunked_scan(
        x.unflatten(-1, (-1, weights.head_dim)),
        F.softplus(dt + weights.dt_bias),
        -weights.A_log.exp(),
        B.unflatten(-1, (weights.num_groups, -1)),
        C.unflatten(-1, (weights.num_groups, -1)),
        weights.D,
        weights.chunk_size,
        documents,
    )
    return (y.flatten(2) * F.silu(z)).to(ACTIVATION_DTYPE)


def mark_partitioned(parameter: nn.Parameter, parts: list[int] | None = None) -> None:
    """Tell Megatron that tensor-parallel ranks split dimension 0, part by part where a parameter packs several."""
    attributes = {"tensor_model_parallel": True, "partition_dim": 0}
    for name, value in (attributes | ({"partition_sizes": parts} if parts else {})).items():
        setattr(parameter, name, value)


class _WholeRows(MambaContextParallel):
    """Megatron's exchange between context ranks for rows that are cut as one, wherever documents begin in them."""

    def pre_conv_ssm(self, input_: Tensor, packed_seq_params: Any = None) -> Tensor:
        """[s / ranks, b, ...] of all heads -> [s, b, ...] of this rank's."""
        return super().pre_conv_ssm(input_)


class Mamba2Mixer(MambaMixer):
    """in_proj, causal convolution, scan, gate, group norm, out_proj. In and out: [s, b, hidden], BF16.

    Megatron's own constructor refuses to run without mamba-ssm and allocates on CUDA, so parameters are made here under
    the same names, shapes and sharding attributes; `forward` and the sharded state are Megatron's.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MambaMixerSubmodules,
        d_model: int,
        layer_number: int,
        pg_collection: ProcessGroupCollection,
        conv_width: int,
        chunk_size: int,
        kernels: MambaKernels,
        norm: NormFunction,
        pp_layer_offset: int = 0,
        name: str | None = None,
    ) -> None:
        MegatronModule.__init__(self, config)
        self.layer_number, self.pp_layer_offset = layer_number, pp_layer_offset
        self.pg_collection, self.tp_group = pg_collection, pg_collection.tp
        self.d_model, self.d_conv, self.chunk_size, self.kernels = d_model, conv_width, chunk_size, kernels
        self.use_mem_eff_path = True  # Megatron's name for: train through _ssm_training
        self._set_sizes(config, pg_collection.tp.size())
        self._make_parameters(config, norm)
        common = {"config": config, "bias": False, "is_expert": False, "tp_group": self.tp_group}
        prefix = f"{name}." if name else ""
        self.in_proj = build_module(
            submodules.in_proj,
            d_model,
            2 * self.d_inner + 2 * self.ngroups * self.d_state + self.nheads,
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="fc1",
            name=f"{prefix}in_proj",
            **common,
        )
        group_width = self.ngroups_local_tp * self.d_state
        inner = self.d_inner_local_tp
        self.in_proj.weight.partition_sizes = [inner, inner, group_width, group_width, self.nheads_local_tp]
        self.out_proj = build_module(
            submodules.out_proj,
            self.d_inner,
            d_model,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="fc2",
            name=f"{prefix}out_proj",
            **common,
        )
        self.cp = self._context_parallel()

    def _set_sizes(self, config: TransformerConfig, ranks: int) -> None:
        """Sizes under the names that Megatron's methods read."""
        self.d_state, self.headdim = config.mamba_state_dim, config.mamba_head_dim
        self.nheads, self.ngroups = config.mamba_num_heads, config.mamba_num_groups
        self.d_inner = self.nheads * self.headdim
        assert self.nheads % ranks == 0, f"{self.nheads} heads over {ranks} ranks"
        assert self.ngroups % ranks == 0, f"{self.ngroups} groups over {ranks} ranks"
        self.nheads_local_tp, self.ngroups_local_tp = self.nheads // ranks, self.ngroups // ranks
        self.d_inner_local_tp = self.d_inner // ranks

    def _make_parameters(self, config: TransformerConfig, norm: NormFunction) -> None:
        """Uninitialized FP32 parameters, cut over tensor-parallel ranks along their first dimension."""
        group_width = self.ngroups_local_tp * self.d_state
        channels, device = self.d_inner_local_tp + 2 * group_width, parameter_device(config)

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, dtype=torch.float32, device=device))

        self.conv1d_weight, self.conv1d_bias = parameter(channels, 1, self.d_conv), parameter(channels)
        self.dt_bias, self.A_log, self.D = (parameter(self.nheads_local_tp) for _ in range(3))
        self.norm = GroupRMSNorm(
            config, self.d_inner_local_tp, self.d_inner // self.ngroups, self.tp_group, function=norm
        )
        parts = [self.d_inner_local_tp, group_width, group_width]
        for convolution in (self.conv1d_weight, self.conv1d_bias):
            mark_partitioned(convolution, parts)
        for vector in (self.dt_bias, self.A_log, self.D, self.norm.weight):
            mark_partitioned(vector)

    def _context_parallel(self) -> MambaContextParallel:
        """Megatron's exchange of sequence pieces for heads, with each rank's slices of the parameters."""
        return _WholeRows(
            cp_group=self.pg_collection.cp,
            d_inner_local_tp=self.d_inner_local_tp,
            nheads_local_tp=self.nheads_local_tp,
            ngroups_local_tp=self.ngroups_local_tp,
            d_state=self.d_state,
            conv1d_weight_cp1=self.conv1d_weight,
            conv1d_bias_cp1=self.conv1d_bias,
            conv1d_padding=self.d_conv - 1,
            dt_bias_cp1=self.dt_bias,
            A_log_cp1=self.A_log,
            D_cp1=self.D,
            D_has_hdim=False,
        )

    def _ssm_training(self, zxBCdt: Tensor, packed_seq_params: Any = None) -> Tensor:
        """Everything between in_proj and out_proj: [s, b, z + x + B + C + dt] -> [s, b, d_inner], BF16."""
        weights = MambaWeights(
            conv_weight=self.cp.get_conv1d_weight(),
            conv_bias=self.cp.get_conv1d_bias(),
            dt_bias=self.cp.get_dt_bias(),
            A_log=self.cp.get_A_log(),
            D=self.cp.get_D(),
            head_dim=self.headdim,
            state_dim=self.d_state,
            num_groups=self.cp.ngroups_local_tpcp,
            chunk_size=self.chunk_size,
        )
        documents = None if packed_seq_params is None else packed_seq_params.seq_idx
        return self.norm(self.cp.post_conv_ssm(self.kernels.core(zxBCdt, weights, documents)))

"""The peer: a training step of the same sizes in Megatron-Core's own classes, with Transformer Engine's specification,
BF16 parameters, an FP32 master copy and the distributed optimizer. Needs transformer-engine.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.activations import squared_relu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

from models.config import ModelConfig
from models.kernels import choose_kernels
from models.shapes import num_blocks, padded_vocab_size
from nvfp4_train.config import RunConfig


def _settings(model: ModelConfig) -> TransformerConfig:
    return TransformerConfig(
        num_layers=num_blocks(model),
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        kv_channels=model.head_dim,
        mamba_num_heads=model.mamba_num_heads,
        mamba_head_dim=model.mamba_head_dim,
        mamba_state_dim=model.mamba_state_dim,
        mamba_num_groups=model.mamba_num_groups,
        use_mamba_mem_eff_path=True,
        is_hybrid_model=True,
        normalization="RMSNorm",
        activation_func=squared_relu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        gradient_accumulation_fusion=False,
    )


class MegatronStep:
    """Each call is one optimizer step on the same random tokens, one micro-batch."""

    def __init__(self, config: RunConfig, warm_up: int) -> None:
        from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
        from megatron.core.models.hybrid.hybrid_model import HybridModel

        choose_kernels(config.model, torch.device("cuda"))  # mamba-ssm's in the same tiles as ours
        model_parallel_cuda_manual_seed(config.seed, force_reset_rng=True)
        settings, vocabulary = _settings(config.model), padded_vocab_size(config.model)
        self.shape = (config.data.micro_batch, config.data.sequence_length)
        self.model = HybridModel(
            config=settings,
            hybrid_stack_spec=hybrid_stack_spec,
            vocab_size=vocabulary,
            max_sequence_length=self.shape[1],
            hybrid_layer_pattern=config.model.pattern,
            position_embedding_type="none",
        ).cuda()
        buffers = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
        self.chunk = DistributedDataParallel(settings, buffers, Float16Module(settings, self.model))
        optimizer = OptimizerConfig(
            optimizer="adam",
            lr=config.optimizer.lr,
            min_lr=0.0,
            weight_decay=config.optimizer.weight_decay,
            bf16=True,
            params_dtype=torch.bfloat16,
            clip_grad=config.optimizer.clip,
            use_distributed_optimizer=True,
        )
        self.optimizer = get_megatron_optimizer(optimizer, [self.chunk])
        settings.finalize_model_grads_func, settings.grad_scale_func = finalize_model_grads, self.optimizer.scale_loss
        text = torch.randint(0, config.model.vocab_size, (self.shape[0], self.shape[1] + 1), device="cuda")
        self.tokens, self.labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
        for _ in range(warm_up):
            self()

    def _forward(self, _batches: Any, chunk: Any) -> tuple[torch.Tensor, Any]:
        positions = torch.arange(self.shape[1], device="cuda").expand(self.shape)
        losses = chunk(self.tokens, positions, None, labels=self.labels)
        return losses, lambda each: (each.float().mean(), {})

    def __call__(self) -> None:
        """Forward, backward, update."""
        self.chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.model.set_is_first_microbatch()  # or Transformer Engine goes on with the weights it quantized before
        get_forward_backward_func()(
            forward_step_func=self._forward,
            data_iterator=iter([None]),
            model=self.chunk,
            num_microbatches=1,
            seq_length=self.shape[1],
            micro_batch_size=self.shape[0],
            forward_only=False,
        )
        self.optimizer.step()

"""DeepSpeed's ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054): parallel=deepspeed.

Stage 1 shards masters and moments, 2 the gradients too, 3 the weights too. With stage 1 gradients are reduced once a step;
stages 2 and 3 keep only shards of them, and therefore reduce with every micro-batch.

Stage 3 gathers weights module by module and releases them in an order that it has recorded. Ranks fall out of step where a
layer runs several times in a forward (seen with 0.19.8: one waits for weights that the other did not release), so that
drafters with training-time test are refused there.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from data_pipelines.engines import resolve_dtype
from data_pipelines.errors import UserError

from ..drafters import Drafter
from ..optim import OptimConfig, build_optimizer, make_moments
from .config import ParallelConfig
from .strategy import MOMENTS, Read, State, Strategy
from .world import World

_BUCKET = 200_000_000  # elements that are reduced at once, at most
_SMALL = 100_000  # elements, at most, of a weight that is not worth sharding


class Zero(Strategy):
    def __init__(self, drafter: Drafter, config: ParallelConfig, optim: OptimConfig, world: World):
        super().__init__(drafter, world)
        if config.zero_stage == 3 and not drafter.shard_units():
            raise UserError(
                f"parallel.zero_stage=3 cannot train {drafter.config.name}, whose layers run several times a step",
                fix="use parallel=fsdp2, which shards the weights too, or parallel.zero_stage=2",
            )
        self._ds = _import(world)
        self._parameters = {name: p for name, p in drafter.named_parameters() if p.requires_grad}
        begin = {name: p.detach().cpu().clone() for name, p in self._parameters.items()}
        self.optimizer = build_optimizer(optim, drafter.parameters(), moments=False)
        self._engine = self._ds.initialize(
            model=drafter,
            optimizer=self.optimizer,
            config=_settings(config, optim, sum(t.numel() for t in begin.values())),
        )[0]
        self._zero = self._engine.optimizer
        make_moments(self.optimizer, self._shards())
        if hasattr(self._zero, "_lazy_init_hp_params_optimizer_state"):
            self._zero._lazy_init_hp_params_optimizer_state()
        # DeepSpeed makes its fp32 masters of weights that it has rounded to the compute dtype.
        for name, p in self._parameters.items():
            self._ds.utils.safe_set_full_fp32_param(p, begin.pop(name).to(world.device))
        self._refresh_weights()

    def __call__(self, *inputs):
        return self._engine(*inputs)

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(last)
        # DeepSpeed averages over the ranks; the loss is one sum over all of them.
        self._engine.backward(loss * self.world.size, scale_wrt_gas=False)

    def step(self, rate: float) -> float:
        for group in self._zero.param_groups:
            group["lr"] = rate
        self._engine.step()
        # A step with a gradient that is not finite is left out, and the norm is then the one of the step before.
        return float(self._engine.get_global_grad_norm()) if self._engine.was_step_applied() else math.nan

    def state(self) -> State:
        """Each tensor is on one rank, on the host; what is short is on all."""
        model = {name: tensor for name, tensor in self.drafter.state_dict().items() if name not in self._parameters}
        optimizer: dict[str, dict[str, Any]] = {}
        for index, (name, p) in enumerate(self._parameters.items()):
            whole = {None: self._ds.utils.safe_get_full_fp32_param(p)}
            whole |= {key: self._ds.utils.safe_get_full_optimizer_state(p, key) for key in MOMENTS}
            optimizer[name] = {"step": torch.tensor(float(self.steps_in_moments))}
            if index % self.world.size == self.world.rank:
                model[name] = whole.pop(None).cpu()
                optimizer[name] |= {key: tensor.cpu() for key, tensor in whole.items()}
        return {"model": model, "optimizer": optimizer}

    def fill(self, read: Read) -> None:
        """One parameter after the other, whole on every rank, so that no more than one is in memory."""
        steps = torch.zeros(())
        for name, p in self._parameters.items():
            shape = getattr(p, "ds_shape", p.shape)
            weight = torch.empty(shape)
            moments = {"step": torch.zeros(()), **{key: torch.empty(shape) for key in MOMENTS}}
            read({"model": {name: weight}, "optimizer": {name: moments}})
            self._ds.utils.safe_set_full_fp32_param(p, weight.to(self.world.device))
            for key in MOMENTS:
                self._ds.utils.safe_set_full_optimizer_state(p, moments[key].to(self.world.device), key)
            steps = torch.maximum(steps, moments["step"])
        for shard in self._shards():
            self.optimizer.state[shard]["step"].copy_(steps)
        self._refresh_weights()

    def full_weights(self) -> dict[str, torch.Tensor]:
        whole = {name: tensor.cpu() for name, tensor in self.drafter.state_dict().items()}
        for name, p in self._parameters.items():
            gathered = self._ds.utils.safe_get_full_fp32_param(p)
            if self.world.rank == 0:
                whole[name] = gathered.cpu()
        return whole if self.world.rank == 0 else {}

    def _shards(self) -> Iterator[torch.Tensor]:
        """This rank's part of the fp32 masters, flat: what the optimizer steps. Each kind of ZeRO optimizer has its name
        for them."""
        for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition"):
            yield from getattr(self._zero, name, ())

    def _refresh_weights(self) -> None:
        """The weights that compute, from the masters."""
        if hasattr(self._zero, "update_lp_params"):
            self._zero.update_lp_params()
            return
        self._zero.checkpoint_event_prologue()
        for group in range(len(self._zero.fp16_groups)):
            self._zero._reassign_or_swap_out_partitioned_parameters(group)
        self._zero.checkpoint_event_epilogue()


def _settings(config: ParallelConfig, optim: OptimConfig, parameters: int) -> dict[str, Any]:
    stage, cuda = config.zero_stage, torch.cuda.is_available()
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": min(_BUCKET, parameters)}
    if stage == 3:  # what is small beside the drafter (norms) stays whole
        zero["stage3_param_persistence_threshold"] = min(_SMALL, parameters // 1000)
    if config.cpu_offload:
        host = {"device": "cpu", "pin_memory": cuda}
        zero |= {"offload_optimizer": host} | ({"offload_param": host} if stage == 3 else {})
    return {
        "train_micro_batch_size_per_gpu": 1,
        # Where a step ends is said with every micro-batch; but offloaded gradients are only added up when this is not 1.
        "gradient_accumulation_steps": 2,
        "gradient_clipping": optim.max_grad_norm,
        "bf16": {"enabled": resolve_dtype(config.compute_dtype) == torch.bfloat16},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,  # torch's AdamW in every mode; DeepSpeed's own would be compiled first
        "zero_allow_untested_optimizer": True,
    }


def _import(world: World):
    try:
        import deepspeed
    except ImportError as error:
        raise UserError(
            "parallel=deepspeed needs DeepSpeed, which is not installed",
            fix="pip install 'draftsmith[deepspeed]', or use parallel=fsdp2",
        ) from error
    deepspeed.utils.logger.setLevel("ERROR")
    # It calls collectives of torch by their old names.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    if world.device.type == "cpu":
        # A faster all-reduce among ranks of one machine would be compiled first, for a minute and with a C++ compiler;
        # gloo gives the same sums.
        import deepspeed.ops

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed

"""What libraries on top of torch do not offer to their callers."""

from . import Table

__getattr__ = Table(
    __name__,
    "transformers 5.16 to 5.24, accelerate 1.12 to 1.15, PEFT 0.20 to 0.21, TRL 1.16",
    """
attention_of: transformers.PreTrainedConfig()._attn_implementation
ATTENTION: transformers.PreTrainedConfig()._attn_implementation
    the attention that a model was built with
from_config: transformers.PreTrainedModel._from_config
    every way to a model without its weights goes through it
init_weights: transformers.PreTrainedModel()._init_weights
    draws the random numbers of weights that a checkpoint lacks
EXPERTS: transformers.PreTrainedConfig()._experts_implementation
    the kernels of the Hub are not predicted
mark_packed: transformers.quantizers.base._assign_is_quantized
    models such as Jamba use a packed layer in another way
DIVIDES_EXPERTS: transformers.integrations.moe()._is_expert_parallel >=5.19
parallel_plans: transformers.PreTrainedModel._resolve_parallel_plans >=5.23
    transformers divides weights and experts over ranks
kept_in_float32: transformers.PreTrainedModel()._keep_in_fp32_modules
    layers that are loaded in float32, and not packed
TRL_KERNEL: trl.kernels.chunked_logprob()._forward_kernel
    TRL's fused head, which newer versions have
FROM_CONFIG: transformers.PreTrainedModel()._from_config
    a model of a class that is not registered for an Auto class
kept_strictly: transformers.PreTrainedModel()._keep_in_fp32_modules_strict
    as above, also in bfloat16
prepare_inputs: transformers.Trainer()._prepare_inputs
    batches that a trainer makes while it trains
LOAD_WEIGHTS: transformers.Trainer()._load_from_checkpoint
LOAD_BEST: transformers.Trainer()._load_best_model
    reads checkpoints under their published names, which a trainer does not convert
TRAIN_BATCH_SIZE: transformers.Trainer()._train_batch_size
    the batch size of a trainer whose arguments change after it is made
logps_of: trl.trainer.grpo_trainer.GRPOTrainer()._get_per_token_logps_and_entropies
    log-probabilities of answers, between generation and training
shared_state: accelerate.state.PartialState()._shared_state
    a workload has a process state of its own
""",
)

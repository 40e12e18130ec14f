"""Names that other codebases and papers have for keys of a config: an error suggests the key."""

ATTENTION, FEED_FORWARD = "model.blocks.main.attention", "model.blocks.main.feed_forward"
OTHER_NAMES = {
    name: key
    for key, names in {
        "steps": "epochs iterations iters max_iters max_steps num_steps total_steps train_steps updates",
        "batch_size": "batch bs bsz global_batch_size micro_batch_size train_batch_size",
        "sequence_length": "block_size context context_length max_seq_len max_sequence_length n_ctx seq seq_len seqlen",
        "data.corpus": "dataset datasets",
        "optimizer.kind": "optim opt",
        "optimizer.learning_rate": "lr max_lr peak_lr",
        "optimizer.schedule": "lr_schedule lr_scheduler lr_scheduler_type scheduler",
        "optimizer.warmup": "warmup_iters warmup_steps",
        "optimizer.weight_decay": "decay wd",
        "optimizer.clip": "clip_grad grad_clip gradient_clipping max_grad_norm",
        "training.accumulate": "accumulation grad_accum gradient_accumulation gradient_accumulation_steps",
        "training.remat": "activation_checkpointing gradient_checkpointing rematerialize remat_policy",
        "mesh.data": "ddp dp data_parallel",
        "mesh.fsdp": "zero",
        "mesh.tensor": "mp tp model_parallel tensor_parallel",
        "mesh.expert": "ep expert_parallel",
        "mesh.context": "cp sp context_parallel sequence_parallel",
        "checkpoint.every": "save_every save_interval save_steps",
        "evaluation.every": "eval_every eval_interval eval_steps",
        "log.every": "log_every log_interval logging_steps",
        "log.tracker": "logger report_to tensorboard wandb mlflow",
        "model.dtype": "precision",
        "model.depth": "layers n_layer n_layers num_hidden_layers num_layers",
        "model.width": "d_model dim emb_dim embed_dim hidden_size n_embd",
        "model.vocab_size": "vocab vocabulary",
        f"{ATTENTION}.heads": "n_head n_heads num_attention_heads num_heads",
        f"{ATTENTION}.kv_heads": "n_kv_heads num_key_value_heads",
        f"{ATTENTION}.head_size": "d_head head_dim",
        f"{FEED_FORWARD}.hidden": "d_ff ffn_dim intermediate_size mlp_dim n_inner",
        f"{FEED_FORWARD}.kind": "activation activation_function hidden_act",
    }.items()
    for name in names.split()
}

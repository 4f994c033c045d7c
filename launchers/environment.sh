# Sourced by the launchers in this folder. Each variable yields to one that is already set.

# One thread a process unless told otherwise: ranks that all use all cores are slower than one.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# Forked loader workers after tokenizers' own threads deadlock or warn.
export TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"
# A dead peer ends NCCL's collectives with an error instead of a hang (PyTorch's default, made sure).
export TORCH_NCCL_ASYNC_ERROR_HANDLING="${TORCH_NCCL_ASYNC_ERROR_HANDLING:-1}"
# torchrun's hosts meet anew at a fresh store whenever their number changes; the shared one would
# still hold the addresses of ranks that are gone.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE="${TORCH_DISABLE_SHARE_RDZV_TCP_STORE:-1}"
# Says which network NCCL chose and why it failed, and nothing else.
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"
# Set these where a host has several networks and the wrong one is taken:
#   export NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0
# Set this to a disk that all hosts see, filled once beforehand, so that no rank downloads:
#   export HF_HOME=/shared/huggingface HF_HUB_OFFLINE=1

"""What the server of `nursery` imports before it forks; starts no thread.

What is not imported here every forked run imports again, up to two seconds each time.
"""

import gc
import importlib
import logging

import torch

from pixelrag.engine.deepspeed import import_deepspeed

import_deepspeed(torch.device("cpu"))
for _name in (
    "pixelrag.cli",
    "pixelrag.config.contrastive",
    "pixelrag.engine.fsdp2",
    "pixelrag.engine.ds_config",
    "pixelrag.train.contrastive",
    "pixelrag.train.distill",
    "pixelrag.train.rag",
    "pixelrag.verify.command",
    "pixelrag.verify.worker",
    "pixelrag.retrieval.coordinator",
    "pixelrag.retrieval.refresh_worker",
    "faiss",
    # Imported by the libraries when they are first used.
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.runtime.zero.stage3",
    "transformers.models.bert.modeling_bert",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.t5.modeling_t5",
    "PIL.PngImagePlugin",
    "torch._dynamo",
    "faiss",
):
    importlib.import_module(_name)
torch.set_num_threads(1)
logging.getLogger("pixelrag").handlers.clear()
# What is here stays: a collection in a forked process (DeepSpeed asks for whole ones) would walk
# through half a million objects, and copy each page it writes a mark to.
gc.collect()
gc.freeze()

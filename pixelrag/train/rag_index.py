"""The knowledge base of a run: its generations, the one in use, and when it is renewed."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pixelrag.config.rag import RagConfig
from pixelrag.data.passages import PassageStore
from pixelrag.distributed.collectives import from_main, told_by_main
from pixelrag.distributed.env import World
from pixelrag.distributed.hosts import gather_on_host
from pixelrag.distributed.interrupt import Interrupted
from pixelrag.distributed.together import together
from pixelrag.engine.base import Engine
from pixelrag.errors import IndexError_
from pixelrag.retrieval.elsewhere import IndexElsewhere
from pixelrag.retrieval.generation import Generation
from pixelrag.retrieval.generations import Generations
from pixelrag.retrieval.refresh import Refresher
from pixelrag.retrieval.refresh_spec import read_json
from pixelrag.retrieval.snapshot import hand_over
from pixelrag.retrieval.staleness import Trigger, drift, probe_rows, top_k_overlap
from pixelrag.retrieval.switch import Switch
from pixelrag.train.checkpoint import list_checkpoints
from pixelrag.train.rag_data import RagParts
from pixelrag.train.rag_recipe import (
    encoder_fingerprints,
    recipe_for,
    say_if_crowded,
    search_device,
    shards_for,
    training_gpus,
)
from pixelrag.train.rag_retrieve import Retriever

_WITNESSES = 16  # passages that the training itself encodes for each snapshot


class KnowledgeBase:
    """What is searched, step by step; every method but `generation` is a collective.

    Args:
        config: the job's configuration.
        world: this process's place.
        passages: the knowledge base.
        parts: models and what makes their inputs.
        engine: holds the document encoder.
        retriever: encodes probes.
    """

    def __init__(
        self,
        config: RagConfig,
        world: World,
        passages: PassageStore,
        parts: RagParts,
        engine: Engine,
        retriever: Retriever,
    ) -> None:
        self._config = config
        self._engine = engine
        self._retriever = retriever
        self._prefix = parts.container.document_prefix
        self._trains = "document" in config.train
        refresh = config.refresh
        encoder = parts.container.part("document")
        self._generations = Generations(Path(config.output_dir) / "index")
        self._held = contextlib.ExitStack()
        self._refresher: Refresher | None = None
        self._elsewhere: IndexElsewhere | None = None
        used, ranks_here = training_gpus(world), len(gather_on_host(None))
        self._unhindered: dict[str, Any] = {"nice": 0}
        if used and refresh.devices == "auto" and refresh.workers == "local":
            self._unhindered["devices"] = [f"cuda:{index}" for index in used]

        with together():
            if world.is_main:
                self._held.enter_context(self._generations.owned())
                lora = config.encoder_lora if self._trains else None
                recipe = recipe_for(
                    config, passages, encoder, parts.documents, lora=lora, used_gpus=used
                )
                if refresh.every_steps is not None:
                    cores = len(os.sched_getaffinity(0))
                    say_if_crowded(recipe, ranks_here, torch.get_num_threads(), cores)
                self._refresher = Refresher(
                    self._generations,
                    recipe,
                    retries=refresh.retries,
                    retry_seconds=refresh.retry_seconds,
                )
                if config.index.holders == "ray":
                    self._elsewhere = IndexElsewhere(
                        config.ray.address,
                        config.index.num_shards,
                        threads=config.index.search_threads,
                        log=self._generations.root / "ray.log",
                        retries=refresh.retries,
                        retry_seconds=refresh.retry_seconds,
                    )
        self.switch = Switch(
            self._generations,
            {
                "passages": passages.fingerprint,
                **encoder_fingerprints(config, encoder, parts.documents),
            },
            refresher=self._refresher,
            lag=refresh.deterministic_lag,
            keep=refresh.keep,
            max_staleness=refresh.max_staleness,
            on_stale=refresh.on_stale,
            prepare=self._elsewhere.hold if self._elsewhere else lambda generation: None,
            shards=shards_for(config.index, world),
            threads=config.index.search_threads,
            **search_device(config.index, world.device),
        )
        self._trigger = Trigger(refresh.every_steps, refresh.trigger, refresh.drift_threshold)
        self._probes = probe_rows(len(passages), refresh.drift_probes, config.seed)
        # Of the checkpoint about to be written, and the one that may not be on the disk yet.
        self._pins: deque[int] = deque(maxlen=2)

    @property
    def generation(self) -> Generation:
        """The one in use.

        Raises:
            IndexError_: there is none yet.
        """
        if self.switch.current is None:
            raise IndexError_("no generation is in use yet")
        return self.switch.current

    def open(self, step: int, state: dict[str, Any] | None) -> None:
        """Build the first generation, or return to that of a checkpoint.

        Args:
            step: optimizer steps done.
            state: `state_dict` of the checkpoint; None for a new run.

        Raises:
            IndexError_: the first generation cannot be made; the log says why.
            CheckpointError: the checkpoint's is no longer there.
        """
        if state is None:
            # Everyone waits for it: the training's devices and priority are free.
            self.switch.begin(step)
            like = self._config.index.start_from
            used_again = {"like": Path(like)} if like else {"earlier": True}
            self._hand_over(step, self._unhindered | used_again)
            if not self.switch.settle(step):
                reason = from_main(lambda: self._of_main.status.reason)
                told = f"the first generation of the index cannot be made: {reason}"
                if like and "index.start_from" not in reason:
                    told += (
                        f". index.start_from {like}: name what `pixelrag index` made with this "
                        "configuration, or leave it out"
                    )
                raise told_by_main(IndexError_(told))
            return
        # The snapshot of this very step is taken after its checkpoint: it will be taken anew.
        from_main(lambda: self._of_main.resume(step - 1))
        self.switch.load_state_dict(state)

    @property
    def _of_main(self) -> Refresher:
        assert self._refresher is not None  # on rank 0
        return self._refresher

    def at_step(self, step: int) -> dict[str, float]:
        """Between two steps: switch or start a refresh where that is due; figures of the look.

        Raises:
            Interrupted: asked to stop while it waits for a generation; all is as before the step.
        """
        figures: dict[str, float] = {}
        start = False
        if self._trigger.looks(step):
            moved = None
            if self._trigger.kind == "drift":
                figures = self.drift()
                moved = figures["index/drift"]
            start = self._trigger.starts(step, moved)
        decision = self.switch.at_step(step, start=start)
        if decision.start:
            try:
                self._hand_over(step)
                if self._config.refresh.deterministic_lag == 0:
                    self.switch.settle(step)
            except Interrupted:  # the resumed run takes this snapshot anew
                self.switch.take_back()
                raise
        return figures

    def drift(self) -> dict[str, float]:
        """How far the encoder has moved from the generation in use."""
        stored = np.asarray(self.generation.vectors_ND[self._probes])
        fresh = self._retriever.vectors(self._engine, self._probes.tolist())
        return {"index/drift": drift(stored, fresh), "index/overlap": top_k_overlap(stored, fresh)}

    def figures(self, step: int) -> dict[str, float]:
        """What to log: age, number, whether a refresh is in flight, and the drift."""
        found = {
            "index/age_steps": float(self.switch.age(step)),
            "index/generation": float(self.switch.number),
            "index/refreshing": float(self.switch.in_flight is not None),
        }
        return found | (self.drift() if self._trains else {})

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint; keeps the generation in use on the disk as long as it may be needed."""
        if self._refresher is not None:
            self._refresher.secure()
            self._pins.append(self.switch.number)
            self.switch.pin((*self._pins, *self._named_by_checkpoints()))
        return self.switch.state_dict()

    def _named_by_checkpoints(self) -> Iterator[int]:
        """Generations that the checkpoints on the disk go on with, however long these are kept."""
        for _, folder in list_checkpoints(Path(self._config.output_dir)):
            state = read_json(folder / "state.json") or {}
            index = state.get("position", {}).get("index", {})
            yield index.get("generation", 0)

    def finish(self, step: int) -> None:
        """At the end of the run: wait for the refresh in flight where that is wanted."""
        if self._config.refresh.final_refresh == "wait":
            self.switch.settle(step)

    def close(self) -> None:
        """End what is in flight, and let go of the folder."""
        if self._elsewhere is not None:
            self._elsewhere.close()  # the switch may be waiting for it
        self.switch.close()
        if self._refresher is not None:
            self._refresher.close()
        self._held.close()

    def _hand_over(self, step: int, circumstances: dict[str, Any] | None = None) -> None:
        with_adapters = self._trains and self._config.encoder_lora.enabled
        rows = self._probes[:: -(-len(self._probes) // _WITNESSES)]
        vectors = self._retriever.vectors(self._engine, rows.tolist())
        hand_over(
            self._engine, self._refresher, self._prefix, step,
            bf16=self._config.engine.precision == "bf16", trainable_only=with_adapters,
            witness=(rows, vectors), circumstances=circumstances,
        )  # fmt: skip

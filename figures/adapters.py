"""Personal adapters of pretrained networks: heads and LoRA, trained alone, averaged, or written by a hypernetwork.

Both networks are pretrained here, on data that no client has:

    drawings   a small ViT on the 964 characters of Omniglot's 30 background alphabets. The clients are the 20
               evaluation alphabets: each tells its own first 20 characters apart, so numbers mean others at each.
    tweets     a small BERT on whether reviews of films are positive. The clients are the 48 users with the most tweets
               to airlines; a tweet is negative, neutral or positive.

Each method has the same rounds, steps, batches and cohorts. Its local rate is one of the same three, chosen on the
validation examples of seed 0. `--out` keeps networks, data and run folders; a line per run goes into `--results`, and
what is there is not run again. A run that was killed goes on from its last checkpoint.

    python -m figures.adapters prepare --omniglot omniglot.npz --reviews DIR --tweets airline_tweets.csv --out OUT
    python -m figures.adapters run --out OUT [--tasks drawings,tweets] [--seeds 3]
    python -m figures.adapters table                                     # what there is, as Markdown
"""

import argparse
import csv
import hashlib
import json
import math
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from figures.pages import read, table_row
from hyperbloom.common.data.texts import token_rows
from hyperbloom.server.cli import main as flower_server
from hyperbloom.server.runs.checkpoint import has_begun
from hyperbloom.server.runs.recorded import has_ended

LORA = "lora:r=2,targets=q_proj|v_proj|query|value"
RESULTS = Path(__file__).with_name("adapters.jsonl")
METHODS = {
    "local, head": ("local", "head"),
    "local, LoRA": ("local", LORA),
    "FedAvg, LoRA": ("fedavg", LORA),
    "FedPer, LoRA": ("fedper", LORA),
    "pFedHN, head": ("pfedhn", "head"),
    "pFedHN, LoRA": ("pfedhn", LORA),
    "ODPFL-HN, LoRA": ("odpfl", LORA),
}
NETWORKS = {"drawings": "drawings-vit", "tweets": "tweets-bert"}
RATES = (0.005, 0.02, 0.1)
NOVEL = 25
"""Percent of the clients that never train, in the runs about newcomers."""

INK = (0.078, 0.225)
MOODS = ("negative", "neutral", "positive")
CLASSES, USERS, TOKENS, WORDS = 20, 48, 48, 4000
RUNS = {
    "drawings": ["--clients", "20", "--cohort", "5"],
    "tweets": ["--clients", str(USERS), "--cohort", "8"],
}
LOCAL = ["local.steps=10", "local.batch_size=16", "local.schedule=constant"]
ROUNDS = 60


# ---------------------------------------------------------------------- networks and data


def prepare(args: argparse.Namespace) -> None:
    """Write both tasks' data, and pretrain both networks."""
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    if not (args.out / "drawings-vit").exists():
        _prepare_drawings(args.omniglot, args.out)
    if not (args.out / "tweets-bert").exists():
        _pretrain_on_reviews(args.reviews, args.out)
    for seed in range(args.seeds):
        _write_tweets(args.tweets, args.out, seed)


def _prepare_drawings(source: Path, out: Path) -> None:
    import transformers

    stored = np.load(source)
    inputs = {part: _reduced(stored[f"{part}_bits"]) for part in ("bg", "ev")}
    labels, owners, kept = [], [], []
    seen: Counter[str] = Counter()
    place: dict[str, int] = {}
    for row, number in enumerate(stored["ev_label"]):
        alphabet, character = str(stored["ev_names"][number]).split("/")
        if f"{alphabet}/{character}" not in place:
            place[f"{alphabet}/{character}"] = seen[alphabet]
            seen[alphabet] += 1
        if (label := place[f"{alphabet}/{character}"]) < CLASSES:
            labels.append(label)
            owners.append(alphabet)
            kept.append(row)
    np.savez(out / "drawings.npz", x=inputs["ev"][kept].numpy(), y=np.array(labels), owner=np.array(owners))
    config = transformers.ViTConfig(
        hidden_size=128,
        num_hidden_layers=6,
        num_attention_heads=4,
        intermediate_size=256,
        image_size=28,
        patch_size=7,
        num_channels=1,
        num_labels=len(stored["bg_names"]),
    )
    network = transformers.ViTForImageClassification(config)
    _pretrain(
        network,
        lambda rows: {"pixel_values": rows},
        inputs["bg"],
        torch.from_numpy(stored["bg_label"].astype(np.int64)),
        40,
        _turned,
        out / "drawings-vit",
    )


def _reduced(bits: Any) -> Tensor:
    """Return drawings `(N, 1, 28, 28)`; a value is the share of ink on its area, less the mean, over the deviation."""
    parts = []
    for start in range(0, len(bits), 512):
        ink = 1 - np.unpackbits(bits[start : start + 512], axis=1, count=105 * 105).reshape(-1, 1, 105, 105)
        parts.append(nn.functional.adaptive_avg_pool2d(torch.from_numpy(ink.astype(np.float32)), 28))
    return (torch.cat(parts) - INK[0]) / INK[1]


def _turned(images: Tensor) -> Tensor:
    """Return images turned, scaled and moved a little, each in its own way."""
    count = len(images)
    angle, scale = 0.2 * torch.randn(count), 1 + 0.1 * torch.randn(count)
    turn = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], 1).view(-1, 2, 2) * scale.view(-1, 1, 1)
    grid = nn.functional.affine_grid(
        torch.cat([turn, 0.1 * torch.randn(count, 2, 1)], 2), list(images.shape), align_corners=False
    )
    return nn.functional.grid_sample(images, grid, padding_mode="border", align_corners=False)


def _pretrain_on_reviews(reviews: Path, out: Path) -> None:
    import tokenizers
    import transformers

    texts, labels = _reviews(reviews)
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    made.normalizer = tokenizers.normalizers.BertNormalizer()
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]"]
    made.train_from_iterator(texts, tokenizers.trainers.WordPieceTrainer(vocab_size=WORDS, special_tokens=special))
    made.post_processor = tokenizers.processors.TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 2)])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]", model_max_length=TOKENS
    )
    rows = tokenizer(texts, truncation=True, padding="max_length", return_tensors="pt")["input_ids"]
    config = transformers.BertConfig(
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=256,
        vocab_size=len(tokenizer),
        max_position_embeddings=TOKENS,
        num_labels=2,
    )
    network = transformers.BertForSequenceClassification(config)
    _pretrain(
        network,
        lambda some: {"input_ids": some, "attention_mask": some.ne(0).long()},
        rows,
        torch.tensor(labels),
        4,
        lambda some: some,
        out / "tweets-bert",
    )
    tokenizer.save_pretrained(out / "tweets-bert")


def _write_tweets(tweets: Path, out: Path, seed: int) -> None:
    """Write the tweets of the users with the most, as tokens, split 60 / 20 / 20 within each user."""
    with tweets.open(encoding="utf-8-sig", newline="") as file:
        said = list(csv.DictReader(file))
    rng, arrays = np.random.default_rng(seed), dict[str, list[Any]]()
    for name, count in Counter(row["name"] for row in said).most_common(USERS):
        rows = [row for row in said if row["name"] == name]
        tokens = token_rows([row["text"] for row in rows], TOKENS, str(out / "tweets-bert"), str(tweets))
        fifth, order = max(1, count // 5), rng.permutation(count)
        parts = {"val": order[:fifth], "test": order[fifth : 2 * fifth], "train": order[2 * fifth :]}
        for part, places in parts.items():
            arrays.setdefault(f"x_{part}", []).extend(tokens[places].astype(np.int32))
            arrays.setdefault(f"y_{part}", []).extend(MOODS.index(rows[place]["airline_sentiment"]) for place in places)
            arrays.setdefault(f"owner_{part}", []).extend([name] * len(places))
    np.savez(out / f"tweets-{seed}.npz", **{key: np.array(values) for key, values in arrays.items()})


def _reviews(folder: Path) -> tuple[list[str], list[int]]:
    """Return the sentences of reviews, and whether each is positive."""
    texts, labels = list[str](), list[int]()
    for path in sorted(folder.rglob("*.csv")) + sorted(folder.rglob("*.tsv")):
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ","):
                if row.get("text") and row.get("label") in ("0", "1"):
                    texts.append(row["text"])
                    labels.append(int(row["label"]))
    if not texts:
        raise SystemExit(f"--reviews: expected tables with the columns text and label in {folder}, found none")
    return texts, labels


def _pretrain(
    network: Any,
    arguments: Callable[[Tensor], dict[str, Tensor]],
    inputs: Tensor,
    labels: Tensor,
    epochs: int,
    change: Callable[[Tensor], Tensor],
    folder: Path,
) -> None:
    """Train with AdamW and a falling rate; a twentieth of the examples is held out, and its accuracy printed."""
    order = torch.randperm(len(labels))
    held, rest = order[: len(order) // 20], order[len(order) // 20 :]
    optimiser = torch.optim.AdamW(network.parameters(), lr=1e-3, weight_decay=0.01)
    steps = epochs * math.ceil(len(rest) / 128)
    falling = torch.optim.lr_scheduler.OneCycleLR(optimiser, 1e-3, total_steps=steps)
    for epoch in range(epochs):
        start, network = time.perf_counter(), network.train()
        for some in rest[torch.randperm(len(rest))].split(128):
            loss = nn.functional.cross_entropy(network(**arguments(change(inputs[some]))).logits, labels[some])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            falling.step()
        network.eval()
        with torch.no_grad():
            found = torch.cat([network(**arguments(inputs[some])).logits.argmax(1) for some in held.split(512)])
        right = 100 * float((found == labels[held]).float().mean())
        print(
            f"{folder.name}: epoch {epoch + 1}, held out {right:.1f} %, {time.perf_counter() - start:.0f} s", flush=True
        )
    network.save_pretrained(folder)


# ---------------------------------------------------------------------- runs


def flags_of(task: str, method: str, rate: float, seed: int, out: Path, novel: bool, folder: Path) -> list[str]:
    """Return the flags of `flower-server` for a run."""
    strategy, adapt = METHODS[method]
    data = {"drawings": "drawings.npz", "tweets": f"tweets-{seed}.npz"}[task]
    flags = ["--engine", "inline", "--strategy", strategy, "--run-dir", str(folder), *RUNS[task], "--seed", str(seed)]
    flags += ["--data", str(out / data), "--split", "owner", "--rounds", str(ROUNDS), "--eval-every", "10"]
    values = ["gains=false", *LOCAL, f"adapt={adapt}", f"backbone={out / NETWORKS[task]}"]
    values += [f"local.learning_rate={rate}", *([f"novel={NOVEL}"] if novel else [])]
    values += ["start=hypernetwork"] if strategy in ("pfedhn", "odpfl") else []
    return flags + [word for value in values for word in ("--set", value)]


def run(
    task: str, method: str, rate: float, seed: int, args: argparse.Namespace, novel: bool = False
) -> dict[str, Any]:
    """Return the line of a run: from the results if it is there, else by running it."""
    weights = (args.out / NETWORKS[task] / "model.safetensors").read_bytes()
    key = {"task": task, "method": method, "rate": rate, "seed": seed, "rounds": ROUNDS, "novel": novel}
    key |= {"network": hashlib.sha256(weights).hexdigest()[:12]}  # another pretraining gives another network
    for line in read(args.results):
        if all(line[name] == value for name, value in key.items()):
            return line
    about = [str(ROUNDS), key["network"], *(["novel"] if novel else [])]
    name = "-".join([task, method.replace(", ", "-"), f"{rate:g}", str(seed), *about])
    folder, start = args.out / "runs" / name, time.perf_counter()
    if has_begun(folder):
        code = 0 if has_ended(folder) else flower_server(["--resume", str(folder)])
    else:
        shutil.rmtree(folder, ignore_errors=True)
        code = flower_server(flags_of(task, method, rate, seed, args.out, novel, folder))
    if code:
        raise SystemExit(f"{name}: flower-server ended with {code}; {folder} has what was done")
    (selected,) = json.loads((folder / "summary.json").read_text()).values()
    rounds = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    played, metrics = [each for each in rounds if each["round"] > 0], selected["metrics"]
    line = key | {
        "selected": selected["round"],
        **{name: round(metrics[name], 2) for name in ("val_mean", "test_mean", "test_worst", "test_pooled")},
        **{name: round(metrics[name], 2) for name in ("novel_test_mean", "novel_test_worst") if name in metrics},
        "bytes": round(statistics.fmean((r["bytes_down"] + r["bytes_up"]) / max(1, r["clients"]) for r in played)),
        "seconds_a_round": round(statistics.median(each["seconds"] for each in played), 3),
        "seconds": round(time.perf_counter() - start, 1),
    }
    with args.results.open("a") as file:
        file.write(json.dumps(line) + "\n")
    return line


def run_all(args: argparse.Namespace) -> None:
    """Search each method's rate with seed 0, then run all seeds; last, newcomers."""
    for task in args.tasks.split(","):
        for novel in (False, True):
            for method in METHODS:
                late = METHODS[method][0] in ("odpfl", "fedavg")
                if (novel and not (late and task == "tweets")) or (not novel and METHODS[method][0] == "odpfl"):
                    continue
                found = [run(task, method, rate, 0, args, novel) for rate in RATES]
                best = max(found, key=lambda line: line["val_mean"])["rate"]
                for seed in range(1, args.seeds):
                    run(task, method, best, seed, args, novel)


# ---------------------------------------------------------------------- the table


def chosen(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines at the rate that validation chose with seed 0."""
    first = [line for line in lines if line["seed"] == 0]
    best = max(first, key=lambda line: line["val_mean"])["rate"] if first else None
    return [line for line in lines if line["rate"] == best]


def cell(lines: Sequence[dict[str, Any]], name: str, digits: int = 1, factor: float = 1.0) -> str:
    """Return mean and deviation over seeds."""
    values = [factor * line[name] for line in lines if name in line]
    if not values:
        return ""
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{spread}"


def table(lines: Sequence[dict[str, Any]], task: str) -> str:
    """Return what there is of a task as Markdown."""
    rows = [table_row(["method", "seeds", "rate", "mean", "worst client", "kB a client and round", "s a round"])]
    rows.append(table_row(["---"] * 7))
    for method in METHODS:
        some = chosen([x for x in lines if (x["task"], x["method"], x["novel"]) == (task, method, False)])
        if some:
            row = [method, str(len(some)), f"{some[0]['rate']:g}", cell(some, "test_mean"), cell(some, "test_worst")]
            row += [cell(some[:1], "bytes", 1, 1e-3), cell(some[:1], "seconds_a_round", 2)]
            rows.append(table_row(row))
    return "\n".join(rows)


def newcomers(lines: Sequence[dict[str, Any]]) -> str:
    """Return what clients that never trained have, as Markdown."""
    rows = [table_row(["method", "seeds", "rate", "those who trained", "newcomers", "worst newcomer"])]
    rows.append(table_row(["---"] * 6))
    for method in METHODS:
        if some := chosen([line for line in lines if line["method"] == method and line["novel"]]):
            row = [method, str(len(some)), f"{some[0]['rate']:g}", cell(some, "test_mean")]
            rows.append(table_row([*row, cell(some, "novel_test_mean"), cell(some, "novel_test_worst")]))
    return "\n".join(rows)


def main(arguments: list[str] | None = None) -> int:
    """Run a command."""
    parser = argparse.ArgumentParser(prog="python -m figures.adapters", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name, does in (("prepare", "make networks and data"), ("run", "run what is missing"), ("table", "print it")):
        command = commands.add_parser(name, help=does)
        command.add_argument("--out", type=Path, default=Path("adapters"))
        command.add_argument("--results", type=Path, default=RESULTS)
        if name == "prepare":
            command.add_argument("--omniglot", type=Path, required=True)
            command.add_argument("--reviews", type=Path, required=True)
            command.add_argument("--tweets", type=Path, required=True)
        if name == "run":
            command.add_argument("--tasks", default="drawings,tweets")
        if name != "table":
            command.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args(arguments)
    if args.command == "table":
        lines = read(args.results)
        print(*(table(lines, task) for task in RUNS), newcomers(lines), sep="\n\n")
    else:
        {"prepare": prepare, "run": run_all}[args.command](args)
    return 0


TABLES = {
    "drawings": lambda: table(read(RESULTS), "drawings"),
    "tweets": lambda: table(read(RESULTS), "tweets"),
    "newcomers": lambda: newcomers(read(RESULTS)),
}

if __name__ == "__main__":
    raise SystemExit(main())

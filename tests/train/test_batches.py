"""Which rows a rank reads, and which labels count."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from finlm import prepare
from finlm.plan import planner
from finlm.plan.plan import Plan
from finlm.recipe import cluster, recipe, shape
from finlm.rows.shards import Order, Rows, Shards
from finlm.train.batches import Batches

from helpers import QUICKSTART


@pytest.fixture
def shards(tiny: tuple[str, ...]) -> Shards:
    return prepare.run(recipe.load(QUICKSTART, tiny).recipe)


@pytest.fixture
def plan(tiny: tuple[str, ...], shards: Shards) -> Plan:
    loaded = recipe.load(QUICKSTART, tiny).recipe
    return planner.make(loaded, cluster.from_hardware(loaded.hardware), shape.of(loaded, shards.vocab_size))


def factored(plan: Plan, *micro_batches: int) -> Plan:
    """The plan with the same rows a step, cut otherwise: a host with one rank for each micro-batch."""
    rows = plan.tokens_per_step // plan.sequence_length
    hosts = tuple(dataclasses.replace(plan.hosts[0], slots=1, micro_batch=count) for count in micro_batches)
    steps = rows // sum(micro_batches)
    sizes = {"world_size": len(hosts), "micro_batch": max(micro_batches), "gradient_accumulation_steps": steps}
    return dataclasses.replace(plan, hosts=hosts, **sizes)


@pytest.mark.parametrize("micro_batches", [(16,), (2,), (4,) * 4, (1,) * 16, (3, 1), (1, 5, 2)], ids=str)
def test_a_step_has_the_same_rows_however_they_are_divided(
    shards: Shards, plan: Plan, micro_batches: tuple[int, ...]
) -> None:
    rows = Rows(shards.split("train"), plan.sequence_length)
    base, other = (Batches(rows, Order(len(rows), 7), p, 0) for p in (plan, factored(plan, *micro_batches)))
    for step in (0, 1, 999):
        assert np.array_equal(base.row_ids(step).ravel(), other.row_ids(step).ravel())
        assert base.supervised(step) == other.supervised(step)


@pytest.mark.parametrize("micro_batches", [(8, 8), (3, 1)], ids=str)
def test_ranks_read_disjoint_rows_that_together_are_the_step(
    shards: Shards, plan: Plan, micro_batches: tuple[int, ...]
) -> None:
    rows, plan = Rows(shards.split("train"), plan.sequence_length), factored(plan, *micro_batches)
    ranks = [list(Batches(rows, Order(len(rows), 7), plan, rank).read(3)) for rank in range(plan.world_size)]
    assert [[len(inputs) for inputs, _ in rank] for rank in ranks] == [
        [count] * plan.gradient_accumulation_steps for count in micro_batches
    ]
    inputs = torch.cat([inputs for rank in ranks for inputs, _ in rank])
    wanted, _ = rows.read(Batches(rows, Order(len(rows), 7), plan, 0).row_ids(3).ravel())
    assert sorted(map(tuple, inputs.tolist())) == sorted(map(tuple, wanted.tolist()))


def test_a_step_read_ahead_is_the_step_and_another_is_not_taken_for_it(shards: Shards, plan: Plan) -> None:
    rows, plan = Rows(shards.split("train"), plan.sequence_length), factored(plan, 3, 1)
    plainly, ahead = (Batches(rows, Order(len(rows), 7), plan, 1, document_masks=True) for _ in range(2))
    for announced, read in ((None, 0), (1, 1), (2, 7), (8, 8)):  # 7: after a roll back
        if announced is not None:
            ahead.read_ahead(announced)
        wanted, found = list(plainly.read(read)), list(ahead.read(read))
        assert all(
            torch.equal(a, b) for one, other in zip(wanted, found, strict=True) for a, b in zip(one, other, strict=True)
        )
        assert plainly.checksum.take() == ahead.checksum.take() != 0
    ahead.rows = rows.__class__([], plan.sequence_length)  # what fails in the thread is raised where it is read
    ahead.read_ahead(9)
    with pytest.raises(IndexError):
        list(ahead.read(9))


def test_the_denominator_is_the_number_of_labels_that_count(shards: Shards, plan: Plan) -> None:
    rows = Rows(shards.split("train"), plan.sequence_length)
    for step in range(len(rows) // 16):
        batches = [Batches(rows, Order(len(rows), 7), plan, rank) for rank in range(plan.world_size)]
        counted = sum(int((labels != -100).sum()) for one in batches for _, labels in one.read(step))
        assert counted == batches[0].supervised(step)


def test_every_token_but_the_first_of_a_shard_is_a_label_once_and_eos_is_learned(shards: Shards, plan: Plan) -> None:
    for shard in shards.split("train"):
        rows = Rows([shard], plan.sequence_length)
        inputs, labels = rows.read(np.arange(len(rows)))
        learned = labels[labels != -100]
        assert np.array_equal(learned, shard.ids[1:])
        assert (learned == shards.eos_id).sum() == shard.documents
        assert np.array_equal(inputs.ravel()[: len(learned)], shard.ids[:-1])


def test_shards_are_found_where_the_manifest_says(shards: Shards) -> None:
    assert Path(shards.directory / "tokenizer.model").exists()

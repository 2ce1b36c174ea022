"""Token-budget batches: nothing lost or repeated, the budget kept, one process or several, resumed or not."""

import numpy as np
import pytest
from accelerate import skip_first_batches
from accelerate.data_loader import prepare_data_loader
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from lightformers_hf.recovery import TokenBatchSampler

pytestmark = pytest.mark.quick

LENGTHS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=120)


def build(lengths, budget, **kwargs):
    return TokenBatchSampler(*zip(*lengths, strict=True), budget, **kwargs)


def epoch(sampler, number):
    sampler.set_epoch(number)
    return list(sampler)


@given(lengths=LENGTHS, budget=st.integers(80, 400), processes=st.integers(1, 3), seed=st.integers(0, 9))
def test_every_pair_once_within_the_budget_in_as_many_batches_as_said(lengths, budget, processes, seed):
    sampler = build(lengths, budget, num_processes=processes, seed=seed)
    for number in range(3):
        batches = epoch(sampler, number)
        assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
        assert len(batches) == len(sampler)
        for batch in batches:
            source, target = np.array([lengths[i] for i in batch]).max(axis=0)
            assert len(batch) * (source + target) <= budget


@given(lengths=LENGTHS, budget=st.integers(80, 400), processes=st.integers(2, 4))
def test_processes_get_disjoint_complete_shares_of_equal_number(lengths, budget, processes):
    shares = []
    for rank in range(processes):
        sampler = build(lengths, budget, num_processes=processes)
        loader = DataLoader(range(len(lengths)), batch_sampler=sampler, collate_fn=list)
        loader = prepare_data_loader(loader, num_processes=processes, process_index=rank)
        shares.append(list(loader.batch_sampler))
        assert len(loader) == len(shares[-1])
    assert len({len(share) for share in shares}) == 1
    indices = [i for share in shares for batch in share for i in batch]
    if len(indices) == len(lengths):
        assert sorted(indices) == list(range(len(lengths)))
    else:  # single pairs already, and not as many as a multiple of the processes: the only case of repetition
        assert set(indices) == set(range(len(lengths)))
        assert len(sampler) == len(lengths)


def test_seed_and_epoch_decide_everything():
    lengths = [(n % 9 + 1, n % 7 + 1) for n in range(200)]
    first = epoch(build(lengths, 100, seed=1), 2)
    assert first == epoch(build(lengths, 100, seed=1), 2)
    assert first != epoch(build(lengths, 100, seed=2), 2)
    other = epoch(build(lengths, 100, seed=1), 3)
    assert {frozenset(batch) for batch in first} != {frozenset(batch) for batch in other}


def test_batches_are_of_similar_length_in_random_order():
    random = np.random.default_rng(0)
    source = random.integers(6, 40, 4000)
    lengths = np.stack([source, source + random.integers(-5, 6, 4000)], axis=1)
    batches = list(build(lengths.tolist(), 2000))
    padded = sum(len(batch) * lengths[batch].max(axis=0).sum() for batch in batches)
    assert lengths.sum() / padded > 0.95
    longest = [int(lengths[batch].max()) for batch in batches]
    assert abs(np.corrcoef(longest[:-1], longest[1:])[0, 1]) < 0.5


def test_the_rest_of_an_epoch_after_a_resume():
    lengths = [(n % 9 + 1, n % 7 + 1) for n in range(50)]
    sampler = build(lengths, 60)
    loader = prepare_data_loader(DataLoader(range(50), batch_sampler=sampler, collate_fn=list), num_processes=1)
    loader.set_epoch(3)  # as Trainer does
    whole = list(loader)
    rest = skip_first_batches(loader, 4)
    rest.set_epoch(3)
    assert list(rest) == whole[4:]


@pytest.mark.parametrize(
    ("lengths", "message"),
    [(([5, 60], [5, 60]), "pair 2 alone has 120"), (([], []), "at least one"), (([1], []), "0 t")],
)
def test_impossible_batches_are_refused(lengths, message):
    with pytest.raises(ValueError, match=message):
        TokenBatchSampler(*lengths, 100)

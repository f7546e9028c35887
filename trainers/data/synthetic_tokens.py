"""Generates synthetic token sequences that a model can learn: a rule gives most tokens, all other tokens are random. No files
are needed."""

from __future__ import annotations

import hashlib

import numpy as np

from shardlab.errors import InputError
from trainers.data.data_sets import DataSource
from trainers.data.sequences import TokenSet, locate_split

VOCABULARY, SEQUENCE_COUNT = 256, 10_000
SEED, VERSION = 10, 1  # if the rule for the tokens changes, the version must change, because it is in the checksum
# If the vocabulary is larger than 256, only its first 256 tokens are used; else a short run would hardly see any token twice.
MOST_SYMBOLS = 256
RANDOM_TOKEN_PROBABILITY = 0.1  # the probability that a token is random, with the same probability for each symbol


class SyntheticTokens(TokenSet):
    """Sequences in which token[k + 1] = (5 token[k] + 3) mod symbols, or, with probability 0.1, any symbol.

    A sequence depends only on a fixed seed and its index. The smallest possible mean loss is the entropy of the next token:
    with V symbols and q = 0.9 + 0.1 / V, this is -q ln q - (V - 1) (0.1 / V) ln(0.1 / V) nats, which is 0.88 for 256 symbols.
    """

    def __init__(self, split: str, seq_len: int, vocabulary: int) -> None:
        """vocabulary: size of the model's vocabulary. Raises InputError if it is below 2."""
        if vocabulary < 2:
            raise InputError(f"vocabulary: found {vocabulary}. Allowed: at least 2, or there is nothing to learn.")
        self.vocabulary = vocabulary
        self._symbols = min(vocabulary, MOST_SYMBOLS)
        self._first_index, sequence_count = locate_split(SEQUENCE_COUNT, split)
        factors, terms = [1], [0]  # the rule applied k times is: factors[k] * token + terms[k]
        for _ in range(seq_len):
            factors.append(5 * factors[-1] % self._symbols)
            terms.append((5 * terms[-1] + 3) % self._symbols)
        self._factors, self._terms = np.array(factors), np.array(terms)
        rule = f"synthetic tokens {VERSION}, seed {SEED}, {split}, {sequence_count} of {seq_len} + 1 below {self._symbols}"
        self.source = DataSource(
            name=f"synthetic tokens below {self._symbols}",
            sha256=hashlib.sha256(rule.encode()).hexdigest(),
            synthetic=True,
            items=sequence_count,
        )

    def read(self, indices: np.ndarray) -> np.ndarray:
        length = len(self._factors)
        random_numbers = np.empty((len(indices), length), np.uint64)
        for row, index in enumerate(indices):
            random_numbers[row] = np.random.Philox(key=np.array([SEED, self._first_index + int(index)], np.uint64)).random_raw(
                length
            )
        # The lower 32 bits of a draw select the random symbol; the upper 32 bits decide whether the token is random.
        random_tokens = (random_numbers % 2**32 % self._symbols).astype(np.int64)
        positions = np.arange(length)
        random_positions = np.where(random_numbers >> 32 < int(RANDOM_TOKEN_PROBABILITY * 2**32), positions, 0)
        # For each position, the position of the last random token, from which the rule computes this token. The first token of
        # a sequence is always random.
        last_random = np.maximum.accumulate(random_positions, axis=1)
        distances = positions - last_random
        start_tokens = np.take_along_axis(random_tokens, last_random, axis=1)
        tokens: np.ndarray = (self._factors[distances] * start_tokens + self._terms[distances]) % self._symbols
        return tokens

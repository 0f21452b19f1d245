"""Beam search that stops when the data says so: a `jax.lax.while_loop` over two slices, with a branch on each.

    python examples/beam_search.py [--cluster embedded|local|ADDRESS]

A small language model writes the ends of words. Half of the words are on one slice and half on the other. One program
searches for both: its loop goes on while any beam is open, and in each turn a `jax.lax.cond` per slice leaves that
slice alone if all beams there are finished. The hosts decide both; the client is not asked between the turns. The same
search in plain JAX gives the same words.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from target import add_cluster_option, cluster_target

import pathways as pw

TEXT = """
anchor basket bridge butter candle carpet castle cheese circle cotton dinner dragon engine fabric feather
finger flower forest garden ginger guitar hammer harbor jacket kettle ladder lantern letter lemon marble
market mirror monkey needle nickel orange oyster pencil pepper pillow planet pocket puzzle rabbit ribbon
rocket saddle salmon silver spider spring summer table tunnel turtle velvet violin walnut window winter
wizard yellow
"""
PROMPTS = (["ca", "ma", "pe", "ri"], ["w", "turtl", "s", "f"])  # per slice
BEAMS, LONGEST = 4, 10
END = 26  # of a word


class Beams(NamedTuple):
    """The beams of some words: P words, B beams each."""

    letters: Any  #: int32[P, B, LONGEST]
    length: Any  #: int32[P, B]
    score: Any  #: float32[P, B]: the logarithm of the chance
    is_over: Any  #: bool[P, B]
    turns: Any  #: int32[]: in how many turns this slice did something


def counted() -> np.ndarray:
    """A model: the logarithm of the chance of each next letter after two letters, counted in TEXT."""
    counts = np.full((27, 27, 27), 0.01, np.float32)
    for word in TEXT.split():
        code = [END, END, *(ord(letter) - ord("a") for letter in word), END]
        for before, last, after in zip(code, code[1:], code[2:], strict=False):
            counts[before, last, after] += 1
    return np.log(counts / counts.sum(-1, keepdims=True))


def begin(prompts: list[str]) -> Beams:
    """The first beam of each word is its prompt; the others are impossible."""
    letters = np.full((len(prompts), BEAMS, LONGEST), END, np.int32)
    for row, prompt in enumerate(prompts):
        letters[row, :, : len(prompt)] = [ord(letter) - ord("a") for letter in prompt]
    length = np.repeat(np.array([[len(prompt)] for prompt in prompts], np.int32), BEAMS, 1)
    score = np.where(np.arange(BEAMS) == 0, 0.0, -np.inf).astype(np.float32) + np.zeros((len(prompts), 1), np.float32)
    return Beams(letters, length, score, np.zeros((len(prompts), BEAMS), bool), np.int32(0))


def extend(model: Any, beams: Beams) -> Beams:
    """One letter more: of all beams and letters, the BEAMS best. A finished beam stays as it is."""
    letters, length, score, is_over, turns = beams
    at = functools.partial(jnp.take_along_axis, letters, axis=-1)
    last = at(length[..., None] - 1)[..., 0]
    before = jnp.where(length > 1, at(jnp.maximum(length[..., None] - 2, 0))[..., 0], END)
    stays = jnp.where(jnp.arange(27) == END, 0.0, -jnp.inf)
    more = score[..., None] + jnp.where(is_over[..., None], stays, model[before, last])
    best, chosen = jax.lax.top_k(more.reshape(len(more), -1), BEAMS)
    beam, letter = chosen // 27, (chosen % 27).astype(jnp.int32)
    letters = jnp.take_along_axis(letters, beam[..., None], 1)
    length, is_over = (jnp.take_along_axis(each, beam, 1) for each in (length, is_over))
    is_new = (jnp.arange(LONGEST) == length[..., None]) & ~is_over[..., None]
    letters = jnp.where(is_new, letter[..., None], letters)
    length = jnp.where(is_over, length, length + 1)
    is_over = is_over | (letter == END) | (length == LONGEST)
    return Beams(letters, length, best, is_over, turns + 1)


def search(models: Any, beams: Any, place: Callable[[int, Any], Any]) -> Any:
    """The whole search, in plain JAX but for `place(n, function)`, which puts a function on slice n."""
    is_open = [place(n, lambda each: ~jnp.all(each.is_over)) for n in range(2)]
    steps = [place(n, extend) for n in range(2)]
    either = place(0, jnp.logical_or)

    def turn(beams: Any) -> Any:
        return tuple(
            jax.lax.cond(is_open[n](each), steps[n], lambda _, each: each, models[n], each)
            for n, each in enumerate(beams)
        )

    return jax.lax.while_loop(lambda beams: either(is_open[0](beams[0]), is_open[1](beams[1])), turn, beams)


def words_of(beams: Beams) -> list[str]:
    """The best beam of each word."""
    best = np.asarray(beams.letters)[:, 0]
    return ["".join(chr(ord("a") + letter) for letter in row if letter != END) for row in best]


def main() -> int:
    """Command line. Returns 1 if the words are not those of plain JAX."""
    parser = argparse.ArgumentParser(description="Search for the ends of words on two slices.")
    add_cluster_option(parser)
    options = parser.parse_args()
    model, prompts = counted(), [begin(each) for each in PROMPTS]
    with pw.connect(cluster_target(options.cluster, islands=2)) as cluster:
        devices = pw.make_virtual_device_set(cluster)
        slices = [devices.add_slice(devices=1, island=n % len(cluster.islands)) for n in range(2)]
        models = [pw.device_put(model, each) for each in slices]
        beams = tuple(pw.device_put(each, where) for each, where in zip(prompts, slices, strict=True))

        @pw.program
        def program(models: Any, beams: Any) -> Any:
            return search(models, beams, lambda n, function: pw.jit(function, devices=slices[n]))

        found = program(models, beams)
        for n, each in enumerate(found):
            pairs = zip(PROMPTS[n], words_of(each), np.asarray(each.score)[:, 0], strict=True)
            shown = ", ".join(f"{prompt}|{word[len(prompt) :]} {score:.2f}" for prompt, word, score in pairs)
            print(f"slice {n}, {int(each.turns)} turns: {shown}")
        plain = jax.jit(lambda models, beams: search(models, beams, lambda _, function: function))
        expected = plain([model, model], tuple(prompts))
        apart = max(
            float(np.abs(np.asarray(a.score)[:, 0] - b.score[:, 0]).max()) for a, b in zip(found, expected, strict=True)
        )
        is_same = all(
            words_of(a) == words_of(b) and int(a.turns) == b.turns for a, b in zip(found, expected, strict=True)
        )
    print(f"plain JAX finds {'the same' if is_same else 'OTHER'} words in as many turns, scores within {apart:.1e}")
    return 0 if is_same else 1


if __name__ == "__main__":
    sys.exit(main())

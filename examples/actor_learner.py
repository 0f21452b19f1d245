"""Reinforcement learning over two slices: environments as host functions on one, the learner on another.

    python examples/actor_learner.py [--cluster embedded|local|ADDRESS] [--goal RETURN] [--iterations N]

One program is one iteration. The parameters go to the actors' slice. There a scan plays: each step computes actions on
the device and gives them to the environments, which are Python objects on that slice's host (`pw.HostObject`). What was
seen goes to the learner's slice, where some epochs of PPO update the parameters in place. The client submits iterations
and looks at a return now and then; no observation passes through it.

The task is to balance poles on carts (Barto, Sutton and Anderson 1983): 1 for each step, at most 200.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from target import add_cluster_option, cluster_target

import pathways as pw

CARTS, STEPS, MOST, HIDDEN = 32, 64, 200, 64
GAMMA, LAMBDA, CLIP, EPOCHS, REWARD = 0.99, 0.95, 0.2, 10, 0.1
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(3e-3))


class Carts:
    """Poles on carts, many at once, in NumPy. A cart begins anew when its pole falls, or after MOST steps."""

    def __init__(self, count: int, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.state = self._begin(count)  # position, speed, angle, speed of the angle
        self.steps = np.zeros(count, np.int32)
        self.ended: list[int] = []  # returns

    def _begin(self, count: int) -> np.ndarray:
        return self.rng.uniform(-0.05, 0.05, (count, 4)).astype(np.float32)

    def observe(self) -> np.ndarray:
        """What is to be seen now: [count, 4]."""
        return self.state

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Pushes each cart to the left (0) or right (1). Gives what is to be seen then, and which poles fell."""
        x, v, angle, turn = self.state.T
        sine, cosine = np.sin(angle), np.cos(angle)
        push = (np.where(actions == 1, 10.0, -10.0) + 0.05 * turn**2 * sine) / 1.1
        bend = (9.8 * sine - cosine * push) / (0.5 * (4.0 / 3.0 - 0.1 * cosine**2 / 1.1))
        pull = push - 0.05 * bend * cosine / 1.1
        self.state = np.stack([x + 0.02 * v, v + 0.02 * pull, angle + 0.02 * turn, turn + 0.02 * bend], 1)
        self.state = self.state.astype(np.float32)
        self.steps += 1
        fell = (np.abs(self.state[:, 0]) > 2.4) | (np.abs(self.state[:, 2]) > 0.2095)
        over = fell | (self.steps >= MOST)
        self.ended += self.steps[over].tolist()
        self.steps[over] = 0
        self.state[over] = self._begin(int(over.sum()))
        return self.state, fell

    def mean_return(self) -> np.float32:
        """Of the last 100 episodes that have ended."""
        return np.float32(np.mean(self.ended[-100:] or [0]))


def network(params: Any, seen: Any) -> tuple[Any, Any]:
    """Log probabilities of the actions, and the value: [..., 4] -> [..., 2], [...]."""
    h = jnp.tanh(jnp.tanh(seen @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"])
    return jax.nn.log_softmax(h @ params["actions"]), (h @ params["value"])[..., 0]


def first_parameters(seed: int = 0) -> Any:
    """Small random weights."""
    rng = np.random.default_rng(seed)

    def weight(n: int, m: int, scale: float) -> Any:
        return (rng.standard_normal((n, m)) * scale / np.sqrt(n)).astype(np.float32)

    zeros = np.zeros(HIDDEN, np.float32)
    return {
        "w1": weight(4, HIDDEN, 1.4),
        "b1": zeros,
        "w2": weight(HIDDEN, HIDDEN, 1.4),
        "b2": zeros,
        "actions": weight(HIDDEN, 2, 0.01),
        "value": weight(HIDDEN, 1, 1.0),
    }


def player(carts: Any) -> Any:
    """(parameters, key) -> what was seen and done in STEPS steps, and the mean return."""
    sees = jax.ShapeDtypeStruct((CARTS, 4), np.float32)
    feels = (sees, jax.ShapeDtypeStruct((CARTS,), np.bool_))

    def play(params: Any, key: Any) -> Any:
        def step(seen: Any, key: Any) -> Any:
            chances, value = network(params, seen)
            action = jax.random.categorical(key, chances)
            chance = jnp.take_along_axis(chances, action[:, None], 1)[:, 0]
            after, fell = pw.host_callback(lambda a: carts.step(a), feels, action)
            return after, {"seen": seen, "action": action, "chance": chance, "value": value, "fell": fell}

        seen = pw.host_callback(lambda: carts.observe(), sees)
        seen, steps = jax.lax.scan(step, seen, jax.random.split(key, STEPS))
        mean = pw.host_callback(lambda _: carts.mean_return(), jax.ShapeDtypeStruct((), np.float32), seen)
        return {**steps, "last": network(params, seen)[1]}, mean

    return play


def learn(params: Any, state: Any, played: Any) -> tuple[Any, Any]:
    """Some epochs of PPO: new parameters, and the optimizer's state."""

    def back(carry: Any, step: Any) -> Any:
        advantage, after = carry
        goes_on = 1.0 - step["fell"]
        delta = REWARD + GAMMA * after * goes_on - step["value"]
        advantage = delta + GAMMA * LAMBDA * goes_on * advantage
        return (advantage, step["value"]), advantage

    steps = {name: each for name, each in played.items() if name != "last"}
    _, advantages = jax.lax.scan(back, (jnp.zeros(CARTS), played["last"]), steps, reverse=True)
    targets = advantages + steps["value"]
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-6)

    def loss_of(params: Any) -> Any:
        chances, value = network(params, steps["seen"])
        ratio = jnp.exp(jnp.take_along_axis(chances, steps["action"][..., None], -1)[..., 0] - steps["chance"])
        gain = jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantages).mean()
        return 0.5 * jnp.mean((value - targets) ** 2) - gain + 0.01 * jnp.mean(jnp.sum(jnp.exp(chances) * chances, -1))

    def epoch(carry: Any, _: Any) -> Any:
        params, state = carry
        updates, state = OPTIMIZER.update(jax.grad(loss_of)(params), state, params)
        return (optax.apply_updates(params, updates), state), None

    return jax.lax.scan(epoch, (params, state), None, EPOCHS)[0]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Actors on one slice, the learner on another.")
    add_cluster_option(parser)
    parser.add_argument("--goal", type=float, default=150.0, help="the mean return at which to stop")
    parser.add_argument("--iterations", type=int, default=150, help="after so many at most")
    options = parser.parse_args()
    with pw.connect(cluster_target(options.cluster, islands=2)) as cluster:
        devices = pw.make_virtual_device_set(cluster)
        actors = devices.add_slice(devices=1, island=0)
        learners = devices.add_slice(devices=1, island=len(cluster.islands) - 1)
        carts = pw.HostObject(Carts, CARTS, seed=1)
        act = pw.jit(player(carts), devices=actors, name="act")
        update = pw.jit(learn, devices=learners, name="learn")

        @pw.program(donate_argnums=(0, 1))
        def iteration(params: Any, state: Any, key: Any) -> Any:
            played, mean = act(pw.device_put(params, actors), key)
            params, state = update(params, state, pw.device_put(played, learners))
            return params, state, mean

        params = first_parameters()
        state, mean = OPTIMIZER.init(params), 0.0
        for number in range(1, options.iterations + 1):
            key = jax.random.fold_in(jax.random.key(0), number)
            params, state, now = iteration(params, state, key)
            if number % 5 == 0:
                mean = float(now)
                print(f"iteration {number:3}: {number * STEPS * CARTS:6} steps, mean return {mean:5.1f}", flush=True)
                if mean >= options.goal:
                    break
        verdict = "reached" if mean >= options.goal else "missed"
        print(f"goal {verdict}: mean return {mean:.1f} of {MOST}, expected {options.goal:g}")


if __name__ == "__main__":
    main()

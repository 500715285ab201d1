"""What the search for the knee finds and what it costs, beside an exhaustive search of the same precision.

Usage: python benchmarks/search.py [SETTINGS] [--seed FIRST]

SIMULATED engines, each drawn at random: how many sequences its KV cache holds, how long its steps take, how many DP
ranks it has. Both searches measure points in the same way, on the same engines: twice as many prompts as the
concurrency, to the end. The exhaustive one doubles to twice the knee and takes eight even steps around it. Printed:
the best throughput that each found, as a ratio, and the seconds that each held the engine, as a ratio.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable

from isambard_serve import scout, search
from isambard_serve.records import Sample
from isambard_serve.search import Measure, Scout, Space, Step, Stop
from isambard_serve.sim.load import ClosedLoop, Load
from isambard_serve.sim.scheduler import Engine, Limits

ISL = OSL = 1024
BLOCK = 16
SAMPLE_S = 1.0
RECOMPUTED = 0.02
"""As the rule of that name: a point in which more was computed twice does not count."""


class Setting:
    """An engine drawn at random."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)  # noqa: S311 - nothing is kept secret
        self.ranks = draw.choice([1, 1, 2, 4, 4, 8])
        fixed_s = 10 ** draw.uniform(-2.3, -1.2)         # 5 to 63 ms that any step takes
        token_s = 10 ** draw.uniform(-5.5, -4.3)         # for each token of the step
        rank_token_s = 10 ** draw.uniform(-5.5, -4.2)    # for each token of the busiest rank
        context_s = 10 ** draw.uniform(-9.5, -8)         # for each token that attention reads
        free = draw.choice([0, 0, 200, 1000])            # tokens that come with the fixed time: the curve has a kink
        sequences = int(10 ** draw.uniform(1.5, 3.2))    # that a rank's KV cache holds: 31 to 1,584
        most = draw.choice([256, 1024, 1024, 4096])      # max_num_seqs
        self.most = most * self.ranks
        self.limits = Limits(ranks=self.ranks, kv_blocks=sequences * (ISL + OSL) // BLOCK, block_size=BLOCK,
                             max_num_seqs=most, max_num_batched_tokens=8192)
        self.step_time: Callable[[int, int, int], float] = lambda batch, busiest, context: (
            fixed_s + max(0, batch - free) * token_s + busiest * rank_token_s + context * context_s)

    @property
    def space(self) -> Space:
        """What the search is told of it."""
        return Space(isl=ISL, osl=OSL, start=min(search.START_PER_RANK * self.ranks, self.most), most=self.most, gpus=1,
                     prompts_per_concurrency=2, repeats=1, budget_gpu_s=float("inf"))


def sample(engine: Engine) -> Sample:
    """What the engine's metrics say."""
    ranks = engine.ranks
    return Sample(
        time=engine.now, scrape_ms=0.0,
        running=sum(len(rank.running) for rank in ranks), waiting=sum(len(rank.waiting) for rank in ranks),
        kv_cache_usage=max(rank.kv_usage for rank in ranks),
        preemptions_total=sum(rank.statistics.preemptions for rank in ranks),
        prompt_tokens_total=sum(rank.statistics.prompt_tokens for rank in ranks),
        generation_tokens_total=sum(rank.statistics.generation_tokens for rank in ranks))


def run(setting: Setting, load: Load, enough: Callable[[list[Sample]], bool]) -> list[Sample]:
    """Puts ``load`` on a fresh engine until it is done or ``enough``; returns the samples of each second."""
    engine = Engine(setting.limits, setting.step_time)
    samples = [sample(engine)]
    loop = ClosedLoop(load, engine)
    while not loop.done and not enough(samples):
        until_s = samples[-1].time + SAMPLE_S
        while not loop.done and engine.next_event_s is not None and engine.next_event_s <= until_s:
            engine.step()
        if not loop.done:
            engine.now = max(engine.now, until_s)
        samples.append(sample(engine))
    return samples


def scouted(setting: Setting, action: Scout) -> Step:
    """Does a scout."""
    samples = run(setting, Load(prompts=action.requests, concurrency=action.concurrency,
                                input_tokens=action.prompt_tokens, output_tokens=action.output_tokens),
                  lambda so_far: scout.enough(scout.active(so_far), action))
    step = scout.step(samples, action, setting.space, samples[-1].time)
    if step is None:
        raise RuntimeError("the engine ran nothing")
    return step


def measured(setting: Setting, concurrency: int, repeat: int = 1) -> Step:
    """Measures a point."""
    prompts = 2 * concurrency
    samples = run(setting, Load(prompts=prompts, concurrency=concurrency, input_tokens=ISL, output_tokens=OSL),
                  lambda _: False)
    running, waiting, kv, preemptions = scout.seen(samples)
    took_s = samples[-1].time
    valid = (preemptions or 0) * ISL < RECOMPUTED * prompts * (ISL + OSL)
    return Step(kind="point", concurrency=concurrency, repeat=repeat, output_tok_s=prompts * OSL / took_s,
                running=running, waiting=waiting, kv_cache_usage=kv, preemptions=preemptions, valid=valid, gpu_s=took_s)


def searched(setting: Setting) -> tuple[list[Step], Stop]:
    """All steps of the search, and how it ended."""
    steps: list[Step] = []
    while not isinstance(action := search.decide(setting.space, steps), Stop):
        steps.append(measured(setting, action.concurrency, action.repeat) if isinstance(action, Measure)
                     else scouted(setting, action))
    return steps, action


def exhaustive(setting: Setting) -> list[Step]:
    """All steps of the exhaustive search."""
    steps: dict[int, Step] = {}

    def rate(concurrency: int) -> float:
        if concurrency not in steps:
            steps[concurrency] = measured(setting, concurrency)
        return best([steps[concurrency]])

    knee = setting.space.start
    while rate(2 * knee) >= (1 + search.NEAR) * rate(knee):
        knee *= 2
    for part in range(1, 9):
        rate(max(1, round(knee / 2 + part * 1.5 * knee / 9)))
    return list(steps.values())


def best(steps: list[Step]) -> float:
    """The best valid throughput of the points in ``steps``."""
    return max((step.output_tok_s or 0.0 for step in steps if step.kind == "point" and step.valid), default=0.0)


def main() -> None:
    """Prints a line for each setting, and the median and the worst of both ratios."""
    parser = argparse.ArgumentParser(description="What the search finds and costs, beside an exhaustive one.")
    parser.add_argument("settings", type=int, nargs="?", default=40, help="how many engines to draw")
    parser.add_argument("--seed", type=int, default=0, help="the first engine's number")
    given = parser.parse_args()
    found, spent = [], []
    print("SIMULATED engines. throughput: the search's best / the exhaustive one's; cost: likewise, in GPU-seconds")
    for seed in range(given.seed, given.seed + given.settings):
        setting = Setting(seed)
        steps, end = searched(setting)
        others = exhaustive(setting)
        found.append(best(steps) / best(others))
        spent.append(sum(step.gpu_s for step in steps) / sum(step.gpu_s for step in others))
        points = [step.concurrency for step in steps if step.kind == "point"]
        print(f"{seed:>4}  throughput {found[-1]:.3f}  cost {spent[-1]:.2f}  knee {end.knee} ({end.saturation}),"
              f" points {points} of {len(others)}, {len(steps) - len(points)} scouts", flush=True)
    print(f"throughput: median {statistics.median(found):.3f}, worst {min(found):.3f}")
    print(f"cost:       median {statistics.median(spent):.2f}, worst {max(spent):.2f}")


if __name__ == "__main__":
    main()

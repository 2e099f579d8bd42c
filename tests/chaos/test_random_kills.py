"""The plug pulled at any instant, by chance: `make test-chaos CHAOS_SECONDS=600 CHAOS_SEED=1` for the long form."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from accounts import settle, versions
from monkey import Monkey

SECONDS = float(os.environ.get("CHAOS_SECONDS", "15"))
# On a slow machine a worker may not have come to life in one of them.
MAX_ROUNDS = 8
SEED = int(os.environ.get("CHAOS_SEED", "1"))


@pytest.mark.slow
def test_kills_at_random_moments_lose_nothing_publish_once_and_never_tear_a_model(make_service) -> None:
    service = make_service(worker={"stop_seconds": 1.0, "max_attempts": 100})
    service.incoming.mkdir(parents=True)
    monkey = Monkey(service, SEED)
    program = [sys.executable, str(Path(__file__).with_name("consumer.py")), str(service.models)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as consumer:
        try:
            for _ in range(MAX_ROUNDS):
                monkey.run(SECONDS)
                if monkey.counts["kills of the service"] and monkey.counts["kills of a worker"]:
                    break
            monkey.calm_down()
            settle(service, seconds=120 + SECONDS)
            monkey.accounts.check(service)
        finally:
            consumer.terminate()
        seen = json.loads(consumer.communicate(timeout=60)[0])
    num_entries, num_versions = sum(monkey.accounts.dropped.values()), len(versions(service))
    print(f"\n{SECONDS:g} s, seed {SEED}: {_described(monkey.counts)};")
    print(f"{num_entries} entries, {num_versions} versions, {seen['versions']} of them seen in {seen['reads']} reads")
    assert seen["wrong"] == []
    assert seen["reads"] > 0
    assert monkey.counts["kills of the service"] > 0
    assert monkey.counts["kills of a worker"] > 0


def _described(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))

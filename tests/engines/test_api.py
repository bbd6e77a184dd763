"""`engines.Artifacts` and its sampler, where it must refuse."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from engines import Artifacts, SampleRequest
from ldlm.errors import SamplerError


def test_a_closed_sampler_is_refused_and_its_run_goes_on(small_artifacts: Path) -> None:
    request = SampleRequest(samples=2, steps=20, length=8, seed=5)
    with Artifacts(small_artifacts).sampler() as sampler:
        run = sampler.run(request)
        next(run)
    with pytest.raises(SamplerError, match="is closed"):
        sampler.run(request)
    assert len(list(run)) == run.total - 1
    (found,) = run.samples
    alone = Artifacts(small_artifacts).sample(2, steps=20, length=8, seed=5)
    assert found.texts == alone.texts == sampler.decode(alone.token_ids)
    assert (found.token_ids == alone.token_ids).all()


def test_a_sampler_is_neither_pickled_nor_used_after_a_fork(small_artifacts: Path) -> None:
    artifacts = pickle.loads(pickle.dumps(Artifacts(small_artifacts)))
    with artifacts.sampler() as sampler:
        with pytest.raises(SamplerError, match="cannot be pickled"):
            pickle.dumps(sampler)
        child = os.fork()
        if child == 0:
            try:
                sampler.run([])
            except SamplerError as error:
                os._exit(17 if "in another process" in str(error) else 1)
            finally:
                os._exit(2)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 17

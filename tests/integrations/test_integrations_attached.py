"""Methods with parameters or state inside frameworks: trained, saved, resumed bit for bit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from test_integrations_lightning import fit
from test_integrations_transformers import Model, hf_trainer
from torch import Tensor, nn
from torch.utils.data import DistributedSampler

import alignmixup as am
from alignmixup.integrations.attached import add_to, check_trained, clip_before_step
from alignmixup.integrations.draws import step_rng
from alignmixup.training.optim import mixer_parameters
from cases import TinyNet, images, labels
from forked import Forked, finish, start_team
from hand_loop import LR, assert_same_weights, batches, data
from torchvision_schemas import define_torchvision_schemas

# The framework's own advice on workers and devices, and what it still calls of torch.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _framework(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    define_torchvision_schemas()  # which the frameworks import
    monkeypatch.chdir(tmp_path)


def mixers(prefix: str = "") -> dict[str, am.Mixer]:
    """Methods for a TinyNet, or for a module with one under a name."""
    return {
        "automix": am.AutoMix(f"{prefix}layer2"),
        "recursive": am.RecursiveMix(f"{prefix}layer4"),
        "samix": am.SAMix(f"{prefix}layer2"),
        "adautomix": am.AdAutoMix(f"{prefix}layer2"),
        "one-of": am.OneOf((am.CutMix(prob=1.0), am.AutoMix(f"{prefix}layer2"))),
    }


PATHS = (Path(__file__).parent, Path(__file__).parents[1])
SLOW = ("samix", "adautomix", "one-of")
EVERY = [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in mixers()]


def attached(mixer: am.Mixer, net: nn.Module) -> am.Mixer:
    """The mixer with its first weights, the same each time."""
    torch.manual_seed(0)
    return mixer.attach(net, torch.zeros_like(images(4)))


def by_hand(
    name: str, rngs: list[torch.Generator], lr: float = LR, clip_norm: float | None = None
) -> tuple[nn.Module, nn.Module]:
    """SGD over four batches, and the module of the mixer after it."""
    net = TinyNet()
    mixer = attached(mixers()[name], net)
    optimizer = torch.optim.SGD([*net.parameters(), *mixer_parameters(mixer)], lr)
    for number, ((x, y), rng) in enumerate(zip(batches(), rngs, strict=True)):
        mixer(net, x, y, rng, progress=number / 4).loss().backward()
        if clip_norm is not None:  # as our trainer does
            norms = [nn.utils.clip_grad_norm_(p, clip_norm) for p in parameters(net, mixer)]
            assert min(norms) > 2 * clip_norm
        optimizer.step()
        optimizer.zero_grad()
    assert mixer.module is not None
    return net, mixer.module


def parameters(net: nn.Module, mixer: am.Mixer) -> tuple[list[nn.Parameter], ...]:
    return list(net.parameters()), mixer_parameters(mixer)


def assert_same(found: nn.Module, expected: nn.Module) -> None:
    """Steps change weights by 1e-2; sums over samples may be in another order."""
    pairs = zip(found.state_dict().values(), expected.state_dict().values(), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, atol=1e-4, rtol=0)


def assert_equal(found: nn.Module, expected: nn.Module) -> None:
    states = found.state_dict(), expected.state_dict()
    assert list(states[0]) == list(states[1])
    assert all(torch.equal(one, states[1][name]) for name, one in states[0].items())


def lightning_module(name: str, lr: float = LR) -> Any:
    from lightning.pytorch import LightningModule

    from alignmixup.integrations.lightning import MixupModule

    class Module(MixupModule, LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.mixer = TinyNet(), mixers("net.")[name]
            torch.manual_seed(0)
            self.attach_mixer(torch.zeros_like(images(4)))

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"logits": self.net(x)}

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr)

    return Module()


def stop_after_an_epoch() -> Any:
    from lightning.pytorch import Callback

    class Stop(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.should_stop = True

    return Stop()


@pytest.mark.parametrize("name", EVERY)
def test_lightning_trains_saves_and_resumes_what_a_mixer_learns(name: str) -> None:
    whole, first, second = (lightning_module(name) for _ in range(3))
    fit(whole)
    net, module = by_hand(name, [step_rng(0, 0, i) for i in range(4)])
    assert_same(whole.net, net)
    assert_same(whole.mixer_module, module)
    callbacks = [stop_after_an_epoch()]
    trainer = fit(first, max_epochs=2, limit_train_batches=2, callbacks=callbacks)
    trainer.save_checkpoint("half.ckpt")
    states = torch.load("half.ckpt", weights_only=False)["state_dict"]
    assert any(key.startswith("mixer_module.") for key in states)
    again = lightning_module(name)
    fit(again, max_epochs=2, limit_train_batches=2)
    fit(second, max_epochs=2, limit_train_batches=2, ckpt_path="half.ckpt")
    assert_equal(second, again)


def test_lightning_names_the_remedy_for_a_mixer_that_is_not_attached() -> None:
    module = lightning_module("automix")
    for mixer in (mixers("net.")["automix"], attached(mixers()["automix"], TinyNet())):
        module.mixer = mixer
        with pytest.raises(ValueError, match=r"AutoMix has .* call self.attach_mixer\(x\)"):
            fit(module)


@pytest.mark.parametrize("name", EVERY)
def test_trainer_trains_saves_and_resumes_what_a_mixer_learns(monkeypatch, name: str) -> None:
    def trainer(**settings: Any) -> Any:
        model = Model()
        mixer = attached(mixers("net.")[name], am.as_logits(model))
        return hf_trainer(monkeypatch, mixer, model=model, **settings)

    whole = trainer(save_strategy="steps", save_steps=2)
    whole.train()
    net, module = by_hand(name, [step_rng(0, i, 0) for i in range(4)])
    assert_same(whole.model.net, net)
    assert_same(whole.mixer.module, module)
    again = trainer()
    again.train(resume_from_checkpoint="out/checkpoint-2")
    assert_equal(again.model, whole.model)
    assert_equal(again.mixer.module, whole.mixer.module)


def test_trainer_refuses_what_would_not_be_trained_or_restored(monkeypatch) -> None:
    model = Model()
    plain = hf_trainer(monkeypatch, am.CutMix(), save_strategy="steps", save_steps=2)
    plain.train()
    mixer = attached(mixers("net.")["automix"], am.as_logits(model))
    trainer = hf_trainer(monkeypatch, mixer, model=model)
    with pytest.raises(FileNotFoundError, match=r"mixer.safetensors does not exist"):
        trainer.train(resume_from_checkpoint="out/checkpoint-2")
    trainer.optimizer = torch.optim.SGD(model.parameters(), LR)
    with pytest.raises(ValueError, match=r"no parameters of AutoMix: give it mixer.module"):
        trainer.create_optimizer()


def test_the_group_of_a_mixer_has_its_own_settings() -> None:
    net = TinyNet()
    mixer = attached(am.AutoMix("layer2", block_lr=0.5), net)
    optimizer = torch.optim.SGD(net.parameters(), LR)
    add_to(optimizer, mixer)
    add_to(optimizer, mixer)  # is there already
    check_trained(optimizer, mixer)
    assert [group["lr"] for group in optimizer.param_groups] == [LR, 0.5]
    adam, odd = torch.optim.AdamW(net.parameters()), am.AutoMix("layer2", block_momentum=0.5)
    with pytest.raises(ValueError, match="AdamW has no setting momentum"):
        add_to(adam, attached(odd, net))


@pytest.mark.parametrize("name", EVERY)
def test_timm_task_trains_saves_and_resumes_what_a_mixer_learns(name: str) -> None:
    from alignmixup.integrations.timm import MixupTask

    def make() -> tuple[Any, torch.optim.Optimizer]:
        net = TinyNet()
        mixer = attached(mixers()[name], net)
        task = MixupTask(net, mixer, num_steps=4, verbose=False)
        optimizer = torch.optim.SGD(net.parameters(), LR)
        assert task.mixer_module is not None
        optimizer.add_param_group({"params": task.mixer_module.parameters()})
        return task, optimizer

    def run(task: Any, optimizer: torch.optim.Optimizer, wanted: range) -> None:
        for number, (x, y) in enumerate(batches()):
            if number in wanted:
                optimizer.zero_grad()
                task(x, y)["loss"].backward()
                optimizer.step()

    whole, optimizer = make()
    run(whole, optimizer, range(2))
    state = whole.get_checkpoint_state()
    saved = {k: {n: copied(t) for n, t in part.items()} for k, part in state.items()}
    run(whole, optimizer, range(2, 4))
    net, module = by_hand(name, [step_rng(0, i) for i in range(4)])
    assert_same(whole.trainable_module, net)
    assert_same(whole.mixer_module, module)
    again, optimizer = make()
    again.load_checkpoint_state(saved["state_dict"], saved["task_state"])
    run(again, optimizer, range(2, 4))
    assert_equal(again.trainable_module, whole.trainable_module)
    assert_equal(again.mixer_module, whole.mixer_module)


CLIP, STEEP = 0.002, 50.0  # a norm that clips every gradient, and steps as long as without


def assert_clipped(net: nn.Module, module: nn.Module | None, rngs: list[torch.Generator]) -> None:
    """Network and mixer are clipped each by its norm, as in our own trainer."""
    expected, learned = by_hand("automix", rngs, STEEP, CLIP)
    assert module is not None
    assert_same(net, expected)
    assert_same(module, learned)


def test_lightning_clips_what_a_mixer_learns() -> None:
    module = lightning_module("automix", STEEP)
    fit(module, gradient_clip_val=CLIP)
    assert_clipped(module.net, module.mixer_module, [step_rng(0, 0, i) for i in range(4)])


def test_trainer_clips_what_a_mixer_learns(monkeypatch) -> None:
    model = Model()
    mixer = attached(mixers("net.")["automix"], am.as_logits(model))
    settings = {"max_grad_norm": CLIP, "learning_rate": STEEP}
    trainer = hf_trainer(monkeypatch, mixer, model=model, **settings)
    trainer.train()
    assert_clipped(model.net, mixer.module, [step_rng(0, i, 0) for i in range(4)])
    hooks = trainer._clipping._optimizer_step_pre_hooks
    trainer.train()  # with the optimizer there is
    assert len(hooks) == 1


@pytest.mark.parametrize("off", [None, 0.0])
def test_trainer_without_clipping_clips_no_mixer(monkeypatch, off) -> None:
    """None is what Transformers 4 takes for no clipping, too."""
    mixer = attached(mixers("net.")["automix"], am.as_logits(model := Model()))
    trainer = hf_trainer(monkeypatch, mixer, model=model, max_grad_norm=off)
    trainer.create_optimizer()
    assert not trainer.optimizer._optimizer_step_pre_hooks


def test_timm_and_accelerate_clip_what_a_mixer_learns() -> None:
    """Their loops clip the parameters they are given: those of the network."""
    from accelerate import Accelerator
    from timm.utils import dispatch_clip_grad

    from alignmixup.integrations.timm import MixupTask

    for is_timm in (True, False):
        net, accelerator = TinyNet(), Accelerator(cpu=True)
        mixer = attached(mixers()["automix"], net)
        optimizer = torch.optim.SGD(net.parameters(), STEEP)
        add_to(optimizer, mixer)
        clip_before_step(optimizer, mixer, CLIP)
        task = MixupTask(net, mixer, num_steps=4, verbose=False)
        prepared = optimizer if is_timm else accelerator.prepare(optimizer)
        for x, y in batches():
            loss = task(x, y)["loss"]
            if is_timm:
                loss.backward()
                dispatch_clip_grad(net.parameters(), CLIP)
            else:
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(net.parameters(), CLIP)
            prepared.step()
            prepared.zero_grad()
        assert_clipped(net, mixer.module, [step_rng(0, i) for i in range(4)])


def copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: copied(part) for name, part in value.items()}
    return value.clone() if isinstance(value, Tensor) else value


@pytest.mark.parametrize("name", EVERY)
def test_accelerate_saves_and_resumes_what_a_mixer_learns(name: str) -> None:
    from accelerate import Accelerator

    def make() -> tuple[Any, ...]:
        accelerator = Accelerator(cpu=True)
        net = TinyNet()
        mixer = attached(mixers()[name], net)
        optimizer = torch.optim.SGD(net.parameters(), LR)
        add_to(optimizer, mixer)
        accelerator.register_for_checkpointing(mixer.module)
        net, optimizer = accelerator.prepare(net, optimizer)
        return accelerator, net, mixer, optimizer

    def run(made: tuple[Any, ...], wanted: range) -> None:
        accelerator, net, mixer, optimizer = made
        for number, (x, y) in enumerate(batches()):
            if number in wanted:
                mixed = mixer(net, x, y, step_rng(0, number), progress=number / 4)
                accelerator.backward(mixed.loss())
                optimizer.step()
                optimizer.zero_grad()

    whole, again = make(), make()
    run(whole, range(2))
    whole[0].save_state("half")
    run(whole, range(2, 4))
    net, module = by_hand(name, [step_rng(0, i) for i in range(4)])
    assert_same(whole[1], net)
    assert_same(whole[2].module, module)
    again[0].load_state("half")
    run(again, range(2, 4))
    assert_equal(again[1], whole[1])
    assert_equal(again[2].module, whole[2].module)


# With DDP, two passes accumulated: the mixer's gradients are the mean of the ranks' own.
PROCESSES = """
import sys
sys.path[:0] = sys.argv[1:]
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import alignmixup as am
from alignmixup.integrations.attached import averaged
from alignmixup.integrations.draws import step_rng
from alignmixup.training.optim import mixer_parameters
from cases import TinyNet, images
from hand_loop import batches

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, parts, net = dist.get_rank(), list(batches()), TinyNet()
found, expected = [], []
for into in (found, expected):
    torch.manual_seed(0)
    into.append(am.AutoMix("layer2").attach(net, images(4)))
# Before the second pass of a step torch 2.9 would overwrite buffers that backward needs.
wrapped = DistributedDataParallel(net, broadcast_buffers=False)
for number in range(2):
    x, y = parts[2 * number + rank]
    averaged(found[0](wrapped, x, y, step_rng(number)).loss(), found[0]).backward()
    for x, y in parts[2 * number : 2 * number + 2]:
        (expected[0](TinyNet(), x, y, step_rng(number)).loss() / 2).backward()
del wrapped
for one, other in zip(mixer_parameters(found[0]), mixer_parameters(expected[0])):
    torch.testing.assert_close(one.grad, other.grad, atol=1e-5, rtol=1e-4)
print("same", flush=True)
"""


def test_the_gradients_of_a_mixer_are_averaged_over_processes() -> None:
    assert finish(start_team(PROCESSES, *PATHS)) == ["same", "same"]


LIGHTNING = """
import sys
sys.path[:0] = sys.argv[1:]
import torch
torch.set_num_threads(1)
import test_integrations_attached as tests
tests.two_processes()
print("same")
"""


@pytest.mark.slow
def test_lightning_in_two_processes_averages_what_a_mixer_learns() -> None:
    """In a process of its own, which has one thread: a fork loses the others of torch."""
    environment = {"OMP_NUM_THREADS": "1", "PL_GLOBAL_SEED": "0"}
    assert Forked(LIGHTNING, [*map(str, PATHS)], environment).finish()[-1] == "same"


def two_processes() -> None:
    define_torchvision_schemas()
    module = lightning_module("automix")
    fit(module, batch_size=4, devices=2, strategy="ddp_fork", limit_train_batches=1)
    net = TinyNet()
    mixer = attached(mixers()["automix"], net)
    for rank in range(2):
        rows = list(DistributedSampler(data(), 2, rank, seed=0))[:4]  # as Lightning makes them
        part = copy.deepcopy(net)
        own = attached(mixers()["automix"], part)
        x, y = images(16)[rows], labels(16)[rows]
        own(part, x, y, step_rng(0, 0, 0)).loss().backward()
        pairs = zip(
            [*net.parameters(), *mixer_parameters(mixer)],
            [*part.parameters(), *mixer_parameters(own)],
            strict=True,
        )
        for parameter, value in pairs:
            half = value.grad / 2
            parameter.grad = half if parameter.grad is None else parameter.grad + half
    torch.optim.SGD([*net.parameters(), *mixer_parameters(mixer)], LR).step()
    assert_same_weights(module.net, net)
    found = mixer_parameters(module.mixer)
    for one, other in zip(found, mixer_parameters(mixer), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=0)

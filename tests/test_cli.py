"""The command line: what people type, and the one line they get when it is wrong."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
from PIL import Image
from rich.table import Table

from alignmixup.cli import main, program
from alignmixup.cli.parsing import parse_value, take_plugins, take_settings, typed_settings
from alignmixup.cli.printing import print_table
from alignmixup.cli.program import COMMANDS, _place_in_user_code
from alignmixup.contracts import RecipeKey, Result
from alignmixup.experiments import sweep
from alignmixup.experiments.scoring import task_names
from alignmixup.recipes.catalog import find_recipe
from alignmixup.recipes.schema import changed
from alignmixup.training import Stopped
from picture_folder import make_pictures

KEY = RecipeKey("cifar10", "r18", "alignmixup")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8/255", 8 / 255),
        ("0.5/255", 0.5 / 255),
        ("-1/4", -0.25),
        ("007", 7.0),
        ("1/2/3", "1/2/3"),
        ("1/0", "1/0"),
        ("1e400/1", "1e400/1"),
        ("a/b", "a/b"),
    ],
)
def test_a_fraction_of_two_numbers_is_a_value(text, value):
    assert parse_value(text) == value


def call(capsys, *args):
    status = main(list(args))
    said = capsys.readouterr()
    return status, said.out, said.err


def test_help_names_every_command(capsys):
    status, out, _ = call(capsys, "--help")
    assert status == 0
    shown = [line.split()[0] for line in out.splitlines() if re.match("  [a-z]", line)]
    assert shown == [*COMMANDS]
    for command in ("demo", "recipes", "train", "evaluate", "report", "figure", "data", "bench"):
        assert command in shown
    assert all(len(line) < 100 for line in out.splitlines())
    assert call(capsys)[1] == out


@pytest.mark.parametrize("command", [*COMMANDS])
def test_every_command_describes_itself(capsys, command):
    words = ("data", "fetch") if command == "data" else (command,)
    with pytest.raises(SystemExit) as stop:
        main([*words, "--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert f"usage: alignmixup {' '.join(words)} " in out
    assert "(default: True)" not in out  # beside --no-pictures it said the opposite


def test_a_published_figure_keeps_its_decimals(capsys):
    _, out, _ = call(capsys, "recipes", "cifar100-r18-input", "--table", "adv")
    assert "   81.30  FGSM" in out


def test_recipes_lists_the_published_figure(capsys):
    status, out, _ = call(capsys, "recipes", "cifar100-r18-alignmixup")
    assert status == 0
    (line,) = [x for x in out.splitlines() if x.split()[:1] == ["cifar100-r18-alignmixup"]]
    assert "18.29" in line
    assert "2000" in line


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["fly"], "unknown command 'fly'"),
        (["trian"], "did you mean 'train'"),
        (["data", "fech", "tiny"], "did you mean 'fetch'"),
        (["evaluate", "nowhere", "--taks", "accuracy"], "--tasks"),
        (["evaluate", "nowhere", "--tasks", "acuracy"], "did you mean 'accuracy'"),
        (["train", "cifar10-r18-baseline", "--train.epoch", "3"], "did you mean 'train.epochs'"),
        (["train", "cifar10-r18-baseline", "--train.lr", "fast"], "train.lr must be float, got"),
        (["sweep", "cifar10-r18-baseline", "--out", "{tmp}/s", "--net.widht", "3"], "'net.width'"),
        (["train", "{tmp}/gone.py:mine"], "gone.py does not exist"),
        (["--plugin", "no_such_module", "report", "x"], "no module 'no_such_module' to import"),
        (["predict", "nowhere", "cat.png"], "not the folder of a run"),
        (["export", "nowhere", "w.safetensors"], "not the folder of a run"),
        (["recipes", "nothing-like-this"], "no recipe matches 'nothing-like-this'"),
        (["train", "cifar10-r18-alignmix"], "did you mean 'cifar10-r18-alignmixup'"),
        (["data", "check", "mnist"], "unknown data set 'mnist'"),
        (["data", "sell", "mnist"], "unknown data command 'sell'"),
        (["figure", "mona-lisa"], "unknown figure 'mona-lisa'"),
        (["figure", "methds"], "did you mean 'methods'"),
        (["--json", "doctor"], "flags come after the command: alignmixup doctor --json"),
        (["doctor", "--jsn"], "unknown flag '--jsn' of 'alignmixup doctor'; did you mean --json?"),
        (["evaluate", "--taks", "accuracy"], "did you mean --tasks"),
        (["predict", "run", "cat.png", "--topk=3"], "did you mean --top?"),
        (["data", "fetch", "cifar10", "--mirror", "x"], "unknown flag '--mirror'"),
        (["train", "cifar10-r18-cutmix", "--lr", "0.1"], "did you mean --train.lr?"),
        (["train", "cifar10-r18-cutmix", "--batch_size", "8"], "did you mean --train.batch-size?"),
        (["sweep", "cifar10-r18-cutmix", "--epochs", "8"], "did you mean --train.epochs?"),
        (["train", "cifar10-r18-cutmix", "runs/a"], "'alignmixup train' does not take 'runs/a'"),
        (["train"], "RECIPE"),
        (["evaluate"], "RUN"),
        (["report"], "name folders of runs"),
        (["export", "run"], "PATH"),
        (["recipes", "cifar10-r18-alinmixup"], "did you mean 'cifar10-r18-alignmixup'"),
        (["bench", "cifar10-r18-alinmixup"], "did you mean 'cifar10-r18-alignmixup'"),
        (["bench", "cifar10-r18-cutmix", "--batch-size", "0"], "\nalignmixup: batch_size must be"),
        (["recipes", "--table", "abation"], "did you mean 'ablation'"),
        (["data", "fetch", "cifar-10"], "did you mean 'cifar10'"),
        (["train", "cifar10-r18-cutmix", "--dataset", "shpes"], "did you mean 'shapes'"),
        (["figure", "effect", "--run", "nowhere"], "not the folder of a run"),
        (["evaluate", "nowhere"], "not the folder of a run"),
        (["train", "cifar10-r18-baseline", "--data", "nowhere", "--out", "{tmp}/r"], "nowhere"),
        (["train", "cifar10-r18-baseline", "--train.epochs", "0"], "epochs must be at least 1"),
        (
            ["train", "cifar10-r18-baseline", "--train.seed", "9" * 20],
            "seed must be from -2**62 to 2**62",
        ),
        (["figure", "toy", "--out", "{tmp}/file/x"], "cannot make the folder"),
        (["data", "shard", "shapes", "{tmp}/file"], "cannot make the folder"),
    ],
)
def test_errors_are_one_clear_line(capsys, tmp_path, monkeypatch, args, named):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    args = [a.format(tmp=tmp_path) for a in args]
    try:
        status, _, err = call(capsys, *args)
    except SystemExit as stop:  # the parser's own way out
        status, err = stop.code, capsys.readouterr().err
    assert status not in (0, None)
    assert named in err
    assert "Traceback" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_misspelt_run_suggests_those_beside_it(capsys, tmp_path):
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "run.json").write_text("{}")
    (tmp_path / "frist2").mkdir()  # no run
    status, _, err = call(capsys, "evaluate", str(tmp_path / "frist"))
    assert status == 1
    assert err.endswith(f"is not the folder of a run; did you mean {tmp_path / 'first'}?\n")


def test_debug_shows_the_trace():
    with pytest.raises(ValueError, match="unknown recipe"):
        main(["train", "cifar10-r18-alignmix", "--debug"])


def test_train_help_shows_the_recipes_own_settings(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["train", "cifar100-r18-cutmix-fast", "--help"])
    out = capsys.readouterr().out
    assert stop.value.code == 0
    for flag in ("--train.epochs", "--mixer.prob", "--net.head", "--dataset", "--out"):
        assert flag in out
    assert "--mixer.eps" not in out  # CutMix aligns nothing


def test_train_and_evaluate_from_the_command_line(capsys, tmp_path):
    out = tmp_path / "run"
    settings = "--net.width 4 --train.epochs 2 --train.batch-size 8 --train.device cpu"
    how = "--limit 16 --mixer.num-iters 5"
    pictures = make_pictures(tmp_path / "pictures")
    args = ["--dataset", pictures, "--out", str(out), *settings.split(), *how.split()]
    status, said, err = call(capsys, "train", "cifar10-r18-alignmixup-fast", *args)
    assert status == 0
    assert "training on cpu: float32, not compiled" in err
    assert "top-1 after 2 epochs: last " in said
    recipe = json.loads((out / "run.json").read_text())
    assert recipe["data"]["name"] == pictures
    assert (recipe["key"]["network"], recipe["key"]["variant"]) == ("r18", "fast-limit16")
    assert recipe["mixer"]["num_iters"] == 5
    status, said, _ = call(capsys, "evaluate", str(out), "--tasks", "accuracy", "calibration")
    assert status == 0
    rows = [line.split() for line in said.splitlines()]
    units = {row[1]: row[3:4] for row in rows}
    expected = {"top1": "%", "ece": "%", "nll": "nats"}
    assert {name: units[name] for name in expected} == {k: [v] for k, v in expected.items()}
    status, _, err = call(capsys, "train", "cifar10-r18-input-fast", *args[:-2])
    assert status == 1
    assert "holds a run of" in err
    recipe["train"]["epochs"] = 5  # as if it had been stopped after two of five
    (out / "run.json").write_text(json.dumps(recipe))
    images, weights = str(tmp_path / "pictures" / "val"), str(tmp_path / "net.safetensors")
    for words in (["evaluate", str(out)], ["predict", str(out), images], ["export", str(out)]):
        more = [weights] if words[0] == "export" else []
        status, _, err = call(capsys, *words, *more)
        assert (status, f"note: {out} is at epoch 2 of 5\n" in err) == (0, True)


def test_report_puts_ours_beside_the_published_figure(capsys, tmp_path):
    lines = [
        Result(
            "accuracy",
            "top1_median10",
            96.5,
            key=KEY,
            seed=seed,
        )
        for seed in (0, 1)
    ]
    (tmp_path / "results.jsonl").write_text("".join(x.to_json() + "\n" for x in lines))
    status, out, _ = call(capsys, "report", str(tmp_path), "--out", str(tmp_path / "out"))
    assert status == 0
    for name in ("tables.md", "tables.tex", "report.html"):
        assert str(tmp_path / "out" / name) in out
        text = (tmp_path / "out" / name).read_text()
        assert "3.50" in text  # our error
        assert "2.95" in text  # the paper's
    status, out, _ = call(capsys, "report", str(tmp_path))
    assert status == 0
    assert "2.95" in out
    status, _, err = call(capsys, "report", str(tmp_path / "nothing"))
    assert status == 1
    assert "nothing" in err
    for out in ("results.jsonl", "results.jsonl/below", "page.html"):
        status, _, err = call(capsys, "report", str(tmp_path), "--out", str(tmp_path / out))
        assert status == 1
        assert "--out must be a folder" in err


def test_a_switch_that_is_on_has_a_flag_to_turn_it_off(capsys, tmp_path):
    line = Result("calibration", "ece", 1.5, key=KEY, seed=0)
    (tmp_path / "results.jsonl").write_text(line.to_json() + "\n")
    status, _, err = call(capsys, "report", str(tmp_path), "--no-pictures")
    assert (status, err) == (0, "")
    status, _, err = call(capsys, "report", str(tmp_path), "--pictures")
    assert status == 1
    assert "did you mean --no-pictures?" in err


def test_a_report_without_a_figure_says_so(capsys, tmp_path):
    # Scored in the middle of training: no figure of the end, which is what the tables show.
    scored = Result("accuracy", "top1", 96.5, key=KEY, seed=0)
    (tmp_path / "results.jsonl").write_text(scored.to_json() + "\n")
    for args, said in (([str(tmp_path)], "no results in"), ([], "name folders of runs")):
        status, _, err = call(capsys, "report", *args)
        assert status == 1
        assert said in err
    calibrated = Result("calibration", "ece", 1.5, key=KEY, seed=0)
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write(calibrated.to_json() + "\n")
    status, out, _ = call(capsys, "report", str(tmp_path))
    assert status == 0
    assert "Calibration" in out


@pytest.mark.filterwarnings("always")
def test_a_warning_is_one_line(capsys, tmp_path):
    whole = Result("calibration", "ece", 1.5, key=KEY, seed=0).to_json()
    (tmp_path / "results.jsonl").write_text(f"{whole}\n{whole[:50]}")
    status, _, err = call(capsys, "report", str(tmp_path))
    assert status == 0
    assert re.fullmatch(r"alignmixup: .*results\.jsonl:2: skipped an unfinished last line\n", err)


def test_no_bar_is_shown_before_an_error(capsys, tmp_path):
    for words in (["data", "fetch", "imagenet"], ["adain", "shapes", "--out", f"{tmp_path}/a"]):
        status, _, err = call(capsys, *words)
        assert status == 1
        assert err.startswith("alignmixup: ")  # and no empty line


def test_names_in_tables_are_no_markup(capsys):
    table = Table("image", "class", box=None)
    table.add_row("photos [old]/cat :cat:.png", "a [/b]")
    print_table(table)
    assert capsys.readouterr().out.splitlines()[1].split() == [
        *["photos", "[old]/cat", ":cat:.png"],
        *["a", "[/b]"],
    ]


def test_shards_in_a_folder_with_a_space_are_named_as_one_types_them(capsys, tmp_path):
    make_pictures(tmp_path / "pets")
    status, out, _ = call(capsys, "data", "shard", f"folder:{tmp_path}/pets", f"{tmp_path}/my pets")
    assert status == 0
    assert out.endswith(f"--dataset 'shards:{tmp_path}/my pets'\n")


def test_data_list_and_check(capsys):
    status, out, _ = call(capsys, "data", "list")
    assert status == 0
    assert "tiny" in out
    status, out, _ = call(capsys, "data", "check", "shapes")
    assert (status, out.strip()) == (0, "shapes: complete")


def test_the_help_of_data_has_one_sentence_a_command(capsys):
    _, out, _ = call(capsys, "data")
    abouts = out.partition("Commands:\n")[2].partition("\n\n")[0]
    assert not re.search(r"[.;]  ", abouts)


@pytest.mark.parametrize(
    ("theirs", "count"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
)
def test_threads_wait_for_each_other_briefly_unless_the_user_says_otherwise(
    capsys, monkeypatch, theirs, count
):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    for name, value in theirs.items():
        monkeypatch.setenv(name, value)
    assert call(capsys, "--version")[0] == 0
    assert os.environ.get("GOMP_SPINCOUNT") == count


def test_ctrl_c_while_commands_are_imported_is_no_trace(monkeypatch):
    class Interrupt:
        def find_spec(self, name, path=None, target=None):
            if name == "alignmixup.cli.program":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "alignmixup.cli.program")
    monkeypatch.setattr(sys, "meta_path", [Interrupt(), *sys.meta_path])
    assert main(["--version"]) == 130


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (KeyboardInterrupt(), (130, "alignmixup: interrupted\n")),
        (Stopped(signal.SIGTERM, "saved in runs/a"), (143, "alignmixup: saved in runs/a\n")),
        (Stopped(signal.SIGTERM), (143, "")),  # of several processes, rank 0 has the message
    ],
)
def test_a_stopped_command_says_what_was_saved_once(capsys, monkeypatch, stop, expected):
    def stopped():
        raise stop

    monkeypatch.setattr(program, "_parse", lambda args: stopped)
    status, _, err = call(capsys, "doctor")
    assert (status, err) == expected


def test_ctrl_c_while_torch_is_imported_ends_the_command(tmp_path):
    """The C++ code of torch discards a KeyboardInterrupt while it imports numpy, as this does."""
    (tmp_path / "torch.py").write_text(
        "import os, signal\n"
        "try:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "except KeyboardInterrupt:\n"
        "    pass\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "alignmixup", "predict", "nowhere", "cat.png"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
    )
    assert (done.returncode, done.stderr) == (130, "alignmixup: interrupted\n")


@pytest.mark.parametrize("encoding", ["ascii", "ascii:surrogateescape"])
def test_an_encoding_without_a_character_prints_a_question_mark(tmp_path, encoding):
    """Piped output on Windows, for instance, has no lines of tables; nor has the locale C."""
    result = Result("calibration", "ece", 1.5, key=RecipeKey("v\u00f6gel", "r18", "input"), seed=0)
    (tmp_path / "results.jsonl").write_text(result.to_json() + "\n")
    done = subprocess.run(
        [sys.executable, "-m", "alignmixup", "report", str(tmp_path)],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"},
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"v?gel" in done.stdout


def test_the_work_goes_on_when_its_output_is_no_longer_read(tmp_path, monkeypatch):
    """``report RUN --out DIR | head`` wrote no page, and ``sweep ... | head`` ended the sweep."""
    results = [Result("calibration", "ece", 1.5, key=KEY, seed=seed) for seed in range(2)]
    (tmp_path / "results.jsonl").write_text("\n".join(r.to_json() for r in results))
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", buffering=1) as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert main(["report", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "report.html").exists()


def test_streams_may_be_closed(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["fly"]) == 1
    assert not sys.stderr.isatty()  # as the progress of training asks


def test_the_package_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "alignmixup", "--version"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONWARNINGS": "error"},
    )
    assert done.stdout.strip().count(".") == 2


@pytest.mark.slow
def test_a_sweep_trains_by_pattern_with_settings_for_all(tmp_path, capsys):
    out_folder = tmp_path / "out"
    words = ["sweep", "cifar10-r18-inp?t-fast", "--out", str(out_folder), "--tasks", "accuracy"]
    words += ["--dataset", make_pictures(tmp_path / "pictures"), "--limit", "16"]
    small = ["--net.width", "4", "--train.epochs", "1", "--train.device", "cpu"]
    assert main([*words, *small, "--set", "train.batch_size=8"]) == 0
    out = capsys.readouterr().out
    assert "-r18-input-fast-limit16-seed0: running" in out
    assert f"1 of 1 done in {out_folder}" in out
    (results,) = out_folder.glob("*-r18-input-fast-limit16-seed0/results.jsonl")
    assert '"metric": "top1_last"' in results.read_text()
    assert main([*words, "--set", "train.epochs"]) == 1
    assert "--set takes NAME=VALUE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("states", "status"),
    [
        (["done", "done"], 0),
        (["stopped", "waiting"], 75),
        (["done", "waiting"], 75),
        (["failed: no data", "waiting"], 1),
    ],
)
def test_a_sweep_with_runs_left_has_an_exit_status_of_its_own(
    tmp_path, monkeypatch, capsys, states, status
):
    recipe = find_recipe("cifar10-r18-input-fast")
    jobs = [sweep.Job(recipe, tmp_path, state) for state in states]
    monkeypatch.setattr(sweep, "sweep", lambda *args, **options: jobs)
    with pytest.raises(SystemExit) as exited:
        sys.exit(main(["sweep", recipe.name, "--out", str(tmp_path), "--minutes", "60"]))
    assert exited.value.code == status
    assert ("run again to resume the rest" in capsys.readouterr().out) == (status == 75)


def test_a_file_whose_name_begins_with_a_dash_is_told_from_a_flag(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "-a.png").touch()
    assert main(["predict", "run", "-a.png"]) == 1
    assert "does not take '-a.png'; for the file write ./-a.png\n" in capsys.readouterr().err


def test_flags_before_the_recipe_do_not_train_another(tmp_path, capsys):
    args = ["train", "--out", str(tmp_path / "run"), "cifar10-r18-input-fast"]
    assert main(args) != 0
    assert (
        "name the recipe first: alignmixup train cifar10-r18-input-fast" in capsys.readouterr().err
    )
    assert not (tmp_path / "run").exists()


USERS_FILE = """
from dataclasses import dataclass, replace
import alignmixup as am
from alignmixup.recipes.catalog import find_recipe

@am.register_mixer
@dataclass(frozen=True)
class NoReturn(am.InputMixup):
    def apply(self, net, x, y, draw):
        super().apply(net, x, y, draw)

def without_return():
    recipe = find_recipe("cifar10-r18-input-fast")
    return replace(recipe, key=replace(recipe.key, method="none"), mixer=NoReturn())

def broken():
    return {}["mixer"]

def refused():
    return am.InputMixup(alpha=-1.0)
"""


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("broken", "KeyError: 'mixer' ({file}, line 17)"),
        (
            "refused",
            "alpha must be positive and finite, got -1.0; use NoMix for no mixing "
            "({file}, line 20)",
        ),
        ("without_return", "NoReturn.apply must return a Mixed(logits, targets), got None"),
    ],
)
@pytest.mark.usefixtures("few_shapes")
def test_an_error_in_a_users_code_is_one_line_with_its_place(tmp_path, capsys, function, said):
    file = tmp_path / "mine.py"
    file.write_text(USERS_FILE)
    words = ["train", f"{file}:{function}", "--out", str(tmp_path / "run"), *SHORT]
    status, _, err = call(capsys, *words)
    assert status == 1
    assert err.splitlines()[-1] == f"alignmixup: {said.format(file=file)}"
    assert "Traceback" not in err


@pytest.mark.parametrize(("folder", "is_users"), [("site-packages", False), ("mine", True)])
def test_the_place_of_an_error_is_not_in_what_is_installed(tmp_path, folder, is_users):
    file = tmp_path / folder / "code.py"
    with pytest.raises(ZeroDivisionError) as raised:
        exec(compile("1 / 0", str(file), "exec"), {})
    error = raised.value.with_traceback(raised.value.__traceback__.tb_next)
    assert _place_in_user_code(error) == (f" ({file}, line 1)" if is_users else "")


def test_a_file_that_is_no_python_is_named_with_the_line(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text("x =\n")
    _, _, err = call(capsys, "train", f"{file}:mine")
    assert err == "alignmixup: invalid syntax (mine.py, line 1)\n"


def test_an_error_of_ours_that_no_sentence_explains_keeps_its_trace(monkeypatch):
    monkeypatch.setattr("alignmixup.cli.program.COMMANDS", {"doctor": None})
    with pytest.raises(AttributeError):
        main(["doctor"])


SHORT = [
    "--net.width",
    "4",
    "--train.batch-size",
    "20",
    "--train.device",
    "cpu",
    "--limit",
    "40",
    "--dataset",
    "shapes",
]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_training_with_its_own_exit_status(tmp_path, capsys, number, status):
    """It was 0, so that ``train && evaluate`` carried on."""
    out = tmp_path / "run"

    def interrupt():
        deadline = time.monotonic() + 60
        while not (out / "checkpoint.safetensors").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    watcher = threading.Thread(target=interrupt)
    watcher.start()
    args = ["train", "cifar10-r18-baseline-fast", *SHORT, "--train.epochs", "5000"]
    found, said, err = call(capsys, *args, "--out", str(out))
    watcher.join()
    assert found == status
    assert "press Ctrl-C again to quit now" in err
    assert "run again to resume" in err
    assert "top-1 after" not in said


def test_settings_are_flags_with_the_names_of_train_changes():
    """The same names and values on the command line, in ``train(changes=)`` and in a sweep."""
    words = ["r", "--train.no-compile", "--train.capture", "--train.epochs=3", "--out", "x"]
    words += ["--train.milestones", "2", "--net.width", "None", "--mixer.layers", "input", "layer1"]
    rest, settings = take_settings([*words, "--data.limit", "8", "--seeds", "1", "2"])
    assert rest == ["r", "--out", "x", "--seeds", "1", "2"]
    recipe = find_recipe("cifar10-r18-manifold")
    changes = typed_settings(settings, [recipe])
    assert changes == {
        "train.compile": False,
        "train.capture": True,
        "train.epochs": 3,
        "train.milestones": (2,),
        "net.width": None,
        "mixer.layers": ("input", "layer1"),
        "data.limit": 8,
    }
    assert changed(recipe, changes).train.milestones == (2,)
    assert typed_settings({"train.milestones": []}, [recipe]) == {"train.milestones": ()}
    _, settings = take_settings(["--train.capture", "true", "--train.nesterov=false"])
    switches = typed_settings(settings, [recipe])
    assert switches == {"train.capture": True, "train.nesterov": False}
    with pytest.raises(ValueError, match=r"--train\.batch-size needs a value"):
        typed_settings({"train.batch_size": []}, [recipe])


def test_a_setting_with_names_is_read_as_the_help_shows_it():
    recipe = find_recipe("cifar10-r18-alignmixup")
    words = ["--mixer.weights", "input", "2", "feat", "1", "feat'", "1"]
    _, settings = take_settings(words)
    weights = changed(recipe, typed_settings(settings, [recipe])).mixer.weights
    assert weights == {"input": 2, "feat": 1, "feat'": 1}


def test_plugins_are_taken_from_anywhere():
    words = ["--plugin", "a", "train", "r", "--plugin=b.py", "--out", "x", "--plugin", "c"]
    assert take_plugins(words) == (["train", "r", "--out", "x"], ["a", "b.py", "c"])
    for bad in (["train", "--plugin"], ["train", "--plugin", "--out"]):
        with pytest.raises(ValueError, match="--plugin needs the name of a module"):
            take_plugins(bad)


HELP = """
import contextlib, io, sys
from alignmixup.cli.program import COMMANDS, main
for words in [["--help"], ["data", "fetch", "--help"], *([c, "--help"] for c in COMMANDS)]:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        main(words)
    assert "usage: alignmixup" in said.getvalue(), words
    assert "torch" not in sys.modules, words
"""


def test_help_loads_no_torch():
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_help_of_train_names_its_flags_and_where_settings_are_listed(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    out = capsys.readouterr().out
    for words in (
        "--out",
        "--dataset",
        "--init-from",
        "--extend",
        "alignmixup train RECIPE --help",
    ):
        assert words in out


def test_the_help_of_evaluate_names_every_task(capsys):
    with pytest.raises(SystemExit):
        main(["evaluate", "--help"])
    out = capsys.readouterr().out
    assert [name for name in task_names(["all"]) if name not in out] == []


def test_a_run_is_scored_on_other_images_that_are_named(tmp_path, capsys):
    out = tmp_path / "run"
    args = ["train", "cifar10-r18-baseline-fast", *SHORT, "--train.epochs", "1"]
    assert call(capsys, *args, "--out", str(out))[0] == 0
    status, _, _ = call(capsys, "evaluate", str(out), "--dataset", "shapes", "--device", "cpu")
    assert status == 0
    last = json.loads((out / "results.jsonl").read_text().splitlines()[-1])
    assert last["settings"]["images"] == "shapes/test, 1000 images"
    folder = tmp_path / "pets"
    for split in ("train", "val"):
        (folder / split / "cat").mkdir(parents=True)
        Image.new("RGB", (32, 32)).save(folder / split / "cat" / "0.png")
    status, _, err = call(capsys, "evaluate", str(out), "--dataset", f"folder:{folder}@32")
    assert status == 1
    assert "trained on 10 classes" in err


def test_a_path_in_the_home_folder_is_expanded(tmp_path, capsys, monkeypatch):
    """A shell does not in ``--out=~/page``, which would make a folder called ``~``."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    result = Result("calibration", "ece", 1.5, key=KEY, seed=0)
    runs = tmp_path / "home" / "runs"
    runs.mkdir(parents=True)
    (runs / "results.jsonl").write_text(result.to_json() + "\n")
    assert call(capsys, "report", "~/runs", "--out=~/page")[0] == 0
    assert (tmp_path / "home" / "page" / "report.html").exists()
    assert not (tmp_path / "~").exists()
    _, _, err = call(capsys, "predict", "~run", "~cat.png")  # names of a folder and of a file
    assert "~run is not the folder of a run" in err


def test_the_version_is_a_name_of_the_package(capsys):
    import alignmixup

    assert call(capsys, "--version")[1].strip() == alignmixup.__version__

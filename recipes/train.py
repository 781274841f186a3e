"""The one script of the image classification recipes: train, test the best checkpoint, sum up.

``ringstrategy run NAME`` calls :func:`main` with the config of a recipe; ``python train.py`` does so with the
``config.yaml`` beside it, if there is one. Lightning's launcher starts the other ranks by running the same command line
again, so all that is here runs in every rank.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import lightning.pytorch as pl
from image_classifier import ImageClassifier
from image_data import ImageDataModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger
from rich.console import Console
from summary import Summary
from torch import Tensor

import ringstrategy  # noqa: F401  registers the names of its strategies

__all__ = ["RecipeCLI", "main"]

# Warnings that do not hold here, hidden to leave the screen to what matters. Spawned ranks import this file as well.
for _message in (
    "does not have many workers",  # the images are in memory
    r"recommended to use `Trainer\(devices=1",  # the test images divide evenly, see digits_data.py
    "Experiment logs directory .* is not empty",  # both loggers write into one new folder
    "isinstance.treespec, LeafSpec.",  # between Lightning and torch
):
    warnings.filterwarnings("ignore", f".*{_message}")


class RecipeCLI(LightningCLI):
    """Builds Trainer, model and data from the YAML config and the command line; runs nothing yet."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add what Lightning's subcommand ``fit`` would have."""
        parser.add_argument("--ckpt_path", type=str | None, default=None, help="Checkpoint to go on training from.")

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse the arguments that follow the recipe's name; ``sys.argv`` stays whole for the launcher."""
        assert isinstance(args, list)  # from main
        self.config = parser.parse_args(args)

    def after_instantiate_classes(self) -> None:
        """Number the folder of the logs.

        A logger counts the versions before it when it is first asked; asked now, before any has made its folder, all
        of them come to the same number and write into one folder.
        """
        for logger in self.trainer.loggers:
            _ = logger.version


class SaveConfigOfFit(SaveConfigCallback):
    """Saves the config when training starts, and not once more for the test.

    Lightning's own remembers in the process that it has saved; with ``spawn`` and ``fork`` the test runs in new ones.
    """

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Save on rank 0, if this is training and there is a folder for its logs."""
        if stage == "fit" and trainer.loggers:
            super().setup(trainer, pl_module, stage)


def main(arguments: Sequence[str], config: Path | None = None, prog: str | None = None) -> None:
    """Train, test the best checkpoint on all ranks, and let rank 0 sum up.

    Args:
        arguments: any argument of LightningCLI; they go before what the config says.
        config: YAML file with the settings of a recipe.
        prog: the command that help and errors show.

    Raises:
        FileNotFoundError: data or weights are missing; known before any rank is started.
    """
    parser_kwargs = {"prog": prog, "default_config_files": [str(config)] if config else []}
    cli = RecipeCLI(
        ImageClassifier,
        pl.LightningDataModule,
        save_config_callback=SaveConfigOfFit,
        subclass_mode_data=True,
        auto_configure_optimizers=False,
        run=False,
        parser_kwargs=parser_kwargs,
        args=list(arguments),
    )
    trainer = cli.trainer
    if isinstance(cli.datamodule, ImageDataModule):
        cli.datamodule.check_files()
    trainer.fit(cli.model, datamodule=cli.datamodule, ckpt_path=cli.config.ckpt_path)
    measured = dict(trainer.callback_metrics)
    best = _best_checkpoint(trainer)
    log_dir = trainer.logger.log_dir if trainer.logger else None
    # With `spawn` and `fork` the test runs in new processes, where CSVLogger begins anew and deletes its own file.
    trainer.loggers = [logger for logger in trainer.loggers if not isinstance(logger, CSVLogger)]
    trainer.test(cli.model, datamodule=cli.datamodule, ckpt_path=best, verbose=False)
    measured |= trainer.callback_metrics
    if not trainer.is_global_zero:
        return
    summary = Summary(
        test_accuracy=_number(measured, "test_accuracy"),
        samples_per_s=_number(measured, "samples_per_s"),
        ranks=trainer.world_size,
        communication_share=_number(measured, "communication_share"),
        checkpoint=str(Path(best).resolve()) if best else None,
    )
    if log_dir:
        summary.write(Path(log_dir) / "summary.json")
    Console().print(summary.table())


def _best_checkpoint(trainer: pl.Trainer) -> str | None:
    callback = trainer.checkpoint_callback
    return callback.best_model_path or None if isinstance(callback, ModelCheckpoint) else None


def _number(metrics: Mapping[str, Tensor], name: str) -> float | None:
    return float(metrics[name]) if name in metrics else None


if __name__ == "__main__":
    beside = Path(__file__).resolve().with_name("config.yaml")
    main(sys.argv[1:], config=beside if beside.is_file() else None)

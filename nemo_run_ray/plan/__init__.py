"""From NeMo-Run's app and executor to what is sent. No cluster and no clock is asked."""

#: Names the folder or zip that is sent where an executor's packager sends nothing.
CODE_DIR = "NEMO_RUN_CODE_DIR"

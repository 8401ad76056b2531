"""Which names and values are taken for credentials."""

import pytest

from nemo_run_ray.fields import credentials_in, is_credential_name

CREDENTIALS = """
    HF_TOKEN OPENAI_API_KEY client_secret DB_PASSWORD TOKEN GITHUB_PAT OPENAI_KEY PGPASSWORD
    DATABASE_URL MY_JUDGE_KEY WANDB_API_KEY AWS_SECRET_ACCESS_KEY NGC_CLI_API_KEY MYSQL_PWD
    SMTP_PASS KAGGLE_KEY AZURE_STORAGE_CONNECTION_STRING REDIS_URL MONGODB_URI SENTRY_DSN
    SLACK_WEBHOOK_URL SSH_PRIVATE_KEY GPG_PASSPHRASE REDISCLI_AUTH DOCKER_AUTH_CONFIG
    SECRET_KEY_BASE
    OPENAI_API_KEYS GOOGLE_APPLICATION_CREDENTIALS SSHPASS JWT_SECRET AWS_SESSION_TOKEN
    HUGGING_FACE_HUB_TOKEN APIKEY X-Api-Key Authorization Proxy-Authorization Cookie X-Proxy-Token
    CF-Access-Client-Secret Ocp-Apim-Subscription-Key LDAP_BIND_PW OPENAI_API_KEY_2
    SECOND_API_KEY FIRST_DB_PASSWORD
"""
OTHERS = """
    TOKENIZERS_PARALLELISM KEYBOARD MONKEY MAX_TOKENS KEY_FRAMES HF_TOKEN_PATH HF_HOME PWD OLDPWD
    PAD_TOKEN COST_PER_TOKEN PUBLIC_KEY INPUT_KEY PATH COMPASS BYPASS PASSES AUTHOR RAY_AUTH_MODE
    SECRET_NAME USE_AUTH NUM_KEYS MASTER_ADDR WANDB_PROJECT BASE_URL OPENAI_BASE_URL X-Request-Id
    Content-Type PATTERN PATIENCE FIRST_PASS MYTOKEN MAX_TOKEN NUM_PASS
    HF_HUB_DISABLE_IMPLICIT_TOKEN
"""


@pytest.mark.parametrize(
    ("name", "expected"),
    [*((name, True) for name in CREDENTIALS.split()), *((name, False) for name in OTHERS.split())],
)
def test_names_of_credentials(name, expected):
    assert is_credential_name(name) is expected


def test_values_of_credentials():
    variables = {
        "OPENAI_API_KEY": "EMPTY",
        "USE_AUTH": "1",
        "TRACKER": "https://me:hunter2@tracker.example.org",
        "INDEX": "https://me@tracker.example.org:8080/a:b@c",
        "HF_TOKEN": "hf_x1",
        "DATABASE_URL": "sqlite:///optuna.db",
        "REWARD_KEY": "score",
        "THINK_TOKEN": "<think>",
        "SSL_KEY": "/etc/ssl/key.pem",
        "GOOGLE_APPLICATION_CREDENTIALS": "/etc/google.json",
        "PGPASSWORD": "hunter",
    }
    assert credentials_in(variables) == ["TRACKER", "HF_TOKEN", "PGPASSWORD"]

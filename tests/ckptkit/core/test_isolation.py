"""Which variables of the environment may hold a secret, by their names and values."""

from ckptkit.core.isolation import HIDDEN, is_secret, is_withheld

NAMES = """
    HF_TOKEN HUGGING_FACE_HUB_TOKEN GH_PAT TOKEN HFTOKEN NPM_TOKEN_READ JWT HF_TOKEN2 TOKEN_FILE
    AWS_SECRET_ACCESS_KEY AWS_ACCESS_KEY_ID AWS_SESSION_TOKEN WANDB_API_KEY OPENAI_APIKEY KEY
    SSH_KEY SSH_AUTH_SOCK MY_PRIVATE_KEY PRIVATEKEY_PEM PRIVATE_DIR DEPLOY_KEYS my_secret
    MYSQL_PWD PGPASSWORD MY_PASSWORD dbPassword SUDO_PASSWD GPG_PASSPHRASE REDIS_PASS
    GOOGLE_APPLICATION_CREDENTIALS CREDENTIAL_FILE SENTRY_DSN COOKIE SESSION_ID OAUTH2_CLIENT
    AUTHORIZATION BASIC_AUTH SLACK_WEBHOOK_URL AZURE_STORAGE_CONNECTION_STRING AZURE_STORAGE_SAS
"""
HARMLESS = """
    GITHUB_WORKSPACE GITHUB_RUN_ID WANDB_PROJECT WANDB_DIR HF_HUB_URL HF_ENDPOINT MASTER_URL
    AWS_PROFILE AWS_REGION AZURE_CLIENT_ID GOOGLE_CLOUD_PROJECT KUBERNETES_SERVICE_HOST PWD OLDPWD
    TOKENIZER_PATH TOKENIZERS_PARALLELISM MAX_TOKENS_PER_GPU MAX_TOKEN_LEN NUM_TOKEN TOKEN_BUDGET
    KEYBOARD MONKEY AUTHOR PASSES COMPASS PATH PATCH HOME BASE_DIR N
"""
VALUES = (
    *("postgres://user:word@host/base", "https://word@host/x", "http://user:word@proxy:3128", "redis://:word@host"),
    *("https://host/x?X-Amz-Signature=1", "s3://key:word@bucket/x", "see https://a:b@c.d for more", HIDDEN),
)
PUBLIC_VALUES = (
    *("", "/data/run", "https://host/x", "hf://org/model@main", "s3://bucket/x", "http://host:80/a", "a@b", "1"),
    *("https://host/x?rev=main", "az://container@account/x"),
)


def test_names_of_secrets():
    known = [
        name for name in NAMES.split() if is_secret(name) and is_secret(name, "/data/run") and is_withheld(name, "")
    ]
    assert known == NAMES.split()
    assert [name for name in HARMLESS.split() if is_secret(name) or is_secret(name, "/data/run")] == []


def test_values_with_a_secret_have_one_under_any_name():
    assert tuple(value for value in VALUES if is_secret("N", value) and is_withheld("N", value)) == VALUES
    assert [value for value in PUBLIC_VALUES if is_secret("N", value)] == []


def test_a_witness_sees_nothing_of_accounts_and_addresses():
    for name in ("GITHUB_WORKSPACE", "WANDB_DIR", "HTTPS_PROXY", "HF_HUB_URL", "AWS_PROFILE"):
        assert is_withheld(name, "/data/run"), name
    assert not is_withheld("LD_LIBRARY_PATH", "/usr/lib")

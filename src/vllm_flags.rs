//! Flags of vLLM that Pagoda does not have: named in the error, with what to do instead.

use clap::error::{ContextKind, ContextValue, ErrorKind};

/// (flag, what to do instead).
const ABSENT: &[(&str, &str)] = &[
    ("--tensor-parallel-size", "a model runs on one device; run one engine a GPU"),
    ("--pipeline-parallel-size", "a model runs on one device; run one engine a GPU"),
    ("--data-parallel-size", "run one engine a GPU"),
    ("--enable-chunked-prefill", "prefill is always chunked, by --max-num-batched-tokens"),
    ("--block-size", "KV blocks have 16 tokens"),
    ("--dtype", "weights stay as the file stores them"),
    ("--quantization", "weights stay as the file stores them; --quantize rounds floating-point ones"),
    ("--tokenizer", "the tokeniser comes with the model file"),
    ("--chat-template", "the chat template comes with the model file"),
    ("--trust-remote-code", "no code is loaded from models"),
    ("--enforce-eager", "there are no CUDA graphs to switch off"),
    ("--swap-space", "give --kv-host-bytes: blocks that leave the device are kept there"),
    ("--enable-lora", "LoRA adapters are not supported"),
    ("--speculative-config", "speculative decoding is not supported"),
    ("--seed", "give `seed` in the request"),
    ("--load-format", "a GGUF file and a directory of safetensors are told apart"),
    ("--revision", "give it with --model hf:ORGANISATION/REPOSITORY@REVISION"),
    ("--download-dir", "set PAGODA_MODELS to a directory for models"),
    ("--hf-overrides", "the configuration comes with the model file"),
    ("--tokenizer-mode", "the tokeniser comes with the model file"),
    ("--cpu-offload-gb", "a model lies whole on its device"),
    ("--num-gpu-blocks-override", "size the KV cache with --kv-cache-memory"),
    ("--scheduling-policy", "requests run by their `priority` field, then in order of arrival"),
    ("--distributed-executor-backend", "a model runs on one device; run one engine a GPU"),
    ("--enable-expert-parallel", "a model runs on one device; run one engine a GPU"),
    ("--enable-auto-tool-choice", "tools are not supported"),
    ("--tool-call-parser", "tools are not supported"),
    ("--reasoning-parser", "reasoning is not told apart from the answer"),
    ("--limit-mm-per-prompt", "prompts are text"),
    ("--kv-transfer-config", "engines share KV blocks through --kv-tier"),
    ("--kv-events-config", "KV events are always on the internal listener, for `pagoda route`"),
    ("--no-enable-prefix-caching", "give --enable-prefix-caching false"),
    ("--kv-cache-memory-bytes", "give --kv-cache-memory"),
    ("--disable-log-requests", "requests are not logged"),
    ("--uvicorn-log-level", "filter logs with PAGODA_LOG"),
    ("--ssl-ca-certs", "clients are known by their API keys"),
    ("--lora-modules", "LoRA adapters are not supported"),
    ("--config", "settings are read from pagoda.toml in the working directory"),
    ("--disable-log-stats", "filter logs with PAGODA_LOG"),
    ("--enable-prompt-tokens-details", "cached tokens are always told"),
    ("--compilation-config", "kernels are compiled at start"),
    ("--async-scheduling", "there is one scheduler"),
    ("--api-server-count", "one process serves HTTP and the model"),
    ("--no-enable-chunked-prefill", "prefill is always chunked, by --max-num-batched-tokens"),
    ("--task", "models generate text"),
    ("--runner", "models generate text"),
    ("--hf-token", "set HF_TOKEN"),
    ("--middleware", "put a proxy in front"),
    ("--root-path", "serve below a path with a proxy in front"),
];

/// The message for a flag that vLLM has and we do not; `None` for any other error.
pub fn explain(error: &clap::Error) -> Option<String> {
    if error.kind() != ErrorKind::UnknownArgument {
        return None;
    }
    let Some(ContextValue::String(argument)) = error.get(ContextKind::InvalidArg) else { return None };
    let flag = argument.split('=').next().unwrap_or(argument);
    if !flag.starts_with('-') {
        return Some(format!("`{flag}` is no flag; a model is given with --model {flag}"));
    }
    if flag.contains('_') {
        return Some(format!("`{flag}` is spelt with hyphens here: {}", flag.replace('_', "-")));
    }
    let (_, instead) = ABSENT.iter().find(|(absent, _)| *absent == flag)?;
    Some(format!("vLLM's `{flag}` does not exist here: {instead}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    fn error(flag: &str) -> clap::Error {
        crate::Cli::try_parse_from(["pagoda", "serve", flag]).err().unwrap()
    }

    #[test]
    fn a_flag_of_vllm_is_named() {
        let message = explain(&error("--tensor-parallel-size=2")).unwrap();
        assert!(message.contains("--tensor-parallel-size") && message.contains("one engine a GPU"), "{message}");
        assert_eq!(explain(&error("--no-such-flag")), None);
        assert!(explain(&error("org/model")).unwrap().contains("--model org/model"));
        assert!(explain(&error("--max_num_seqs=3")).unwrap().contains("--max-num-seqs"));
    }

    #[test]
    fn no_flag_of_serve_is_both_here_and_absent() {
        use clap::CommandFactory;
        let command = crate::Cli::command();
        let serve = command.find_subcommand("serve").unwrap();
        for argument in serve.get_arguments().filter_map(clap::Arg::get_long) {
            let flag = format!("--{argument}");
            assert!(ABSENT.iter().all(|(absent, _)| *absent != flag), "{flag}");
        }
    }
}

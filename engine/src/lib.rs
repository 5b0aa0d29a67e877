//! The inference engine: model file to tokens.
//!
//! The life of a request: `server` parses it, `chat_template` and `tokenizer` turn it into token ids, `engine_loop` hands
//! it to the engine's thread, `scheduler` gives it blocks and a share of each step, `batch` lays the step out,
//! `model_runner` runs `model` over the `ops` of a device (`kernels` record the WGSL of the `shaders` crate), `sampler`
//! picks the token, `detokenizer` makes it text, and `server` streams it.

pub mod announcer;
pub mod batch;
pub mod chat_template;
pub mod config;
pub mod detokenizer;
pub mod device;
pub mod engine;
pub mod engine_loop;
pub mod error;
pub mod event;
pub mod fingerprint;
pub mod kernels;
pub mod kv;
pub mod metrics;
pub mod model;
pub mod model_file;
pub mod model_runner;
pub mod offload;
pub mod ops;
pub mod sampler;
pub mod sampling_defaults;
pub mod sampling_params;
pub mod scheduler;
pub mod sequence;
pub mod server;
pub mod sim;
pub mod sizes;
pub mod step_rate;
pub mod tokenizer;

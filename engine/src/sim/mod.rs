//! The simulated device: a latency model in place of the model, behind the real server, scheduler and block manager.
//!
//! Chosen by `--device sim:<profile>`. It keeps a cache of its own, so that a lost or doubled token or a wrong block changes
//! the text: the token at a position is a hash of all tokens before it as the block table leads to them, the seed and the
//! position. Hundreds of such engines fit in one process.

mod profile;
mod runner;

pub use profile::{Faults, SimProfile};
pub use runner::SimRunner;

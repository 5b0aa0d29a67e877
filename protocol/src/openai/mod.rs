//! OpenAI's API as we speak it: requests parsed once into valid types, responses as serde structs.
//!
//! Parsing goes field by field over the JSON object, so that an error names the parameter and shows what it was.
//! Unknown fields are ignored; known fields that we do not serve are refused unless they ask for nothing.

mod chat;
mod completion;
mod error;
mod fields;
mod response;
mod routed;
mod sampling;

pub use chat::{ChatRequest, Message};
pub use completion::{CompletionRequest, Prompt};
pub use error::{ErrorBody, ErrorObject, ErrorType};
pub use fields::{FieldError, Fields};
pub use response::{
    ChatChoice, ChatChunk, ChatChunkChoice, ChatCompletion, ChatDelta, ChatLogprobs, ChatMessage, ChatTokenLogprob,
    Completion, CompletionChoice, CompletionLogprobs, Model, ModelList, Usage,
};
pub use routed::RoutedRequest;
pub use sampling::{SamplingFields, usable_temperature, usable_top_p};

//! A request's body from any bytes: where the engine takes it, the router reads the same content in it.

use protocol::openai::{ChatRequest, CompletionRequest, Prompt, RoutedRequest};
use protocol::prompt_chain::{ChainKind, ChainRoot, PromptChain};

fn root(kind: ChainKind) -> ChainRoot<'static> {
    ChainRoot { cache_salt: "s", ..ChainRoot::new(kind, "m") }
}

pub fn check(bytes: &[u8]) {
    let chat = RoutedRequest::parse(bytes, true).map(|request| request.chain("m", "s"));
    let text = RoutedRequest::parse(bytes, false).map(|request| request.chain("m", "s"));
    let Ok(body) = serde_json::from_slice(bytes) else {
        // What the router passes over unread it need not understand; what it reads, it has checked.
        return;
    };
    if let Ok(request) = ChatRequest::parse(&body) {
        let mut chain = PromptChain::new(&root(ChainKind::Chat));
        request.messages.iter().for_each(|message| message.extend(&mut chain));
        assert_eq!(chat.unwrap(), chain);
    }
    if let Ok(request) = CompletionRequest::parse(&body) {
        let chain = match request.prompt {
            Prompt::Text(text) => {
                let mut chain = PromptChain::new(&root(ChainKind::Text));
                chain.push_text(&text);
                chain
            }
            Prompt::TokenIds(ids) => {
                let mut chain = PromptChain::new(&root(ChainKind::TokenIds));
                chain.push_token_ids(&ids);
                chain
            }
        };
        assert_eq!(text.unwrap(), chain);
    }
}

//! `GET /v1/models` and `/v1/models/{id}`.

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use protocol::openai::{Model, ModelList};

use super::error::ApiError;
use super::{Server, Shared};

impl Server {
    fn model(&self, name: &str) -> Model {
        let max_model_len = self.engine.max_model_len();
        Model { id: name.to_owned(), object: "model", created: self.started_at_s, owned_by: "pagoda", max_model_len }
    }
}

/// All names that are served.
pub(super) async fn list(State(server): Shared) -> Json<ModelList> {
    let data = server.config.served_model_names.iter().map(|name| server.model(name)).collect();
    Json(ModelList { object: "list", data })
}

/// One of them.
pub(super) async fn one(
    State(server): Shared,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<Model>, ApiError> {
    let Path(id) = id.map_err(|error| ApiError::bad_request(error.to_string(), "id"))?;
    server.check_model(Some(&id))?;
    Ok(Json(server.model(&id)))
}

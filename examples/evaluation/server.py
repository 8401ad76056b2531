"""Serves a classifier of handwritten digits, which it trains first."""

import os

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
from sklearn.datasets import load_digits
from sklearn.svm import SVC

images, digits = load_digits(return_X_y=True)
model = SVC(gamma=0.001).fit(images[:-450], digits[:-450])  # the last 450 are the client's
app = FastAPI()


class Image(BaseModel):
    pixels: list[float]  # 8 rows of 8, from 0 to 16


@app.get("/health")
def health() -> str:
    return f"trained on {len(images) - 450} digits"


@app.post("/predict")
def predict(image: Image) -> int:
    return int(model.predict([image.pixels])[0])


if __name__ == "__main__":
    port = int(os.environ["NEMO_RUN_SERVER_PORT_HTTP"])
    # The client may be on another node, so not on 127.0.0.1.
    uvicorn.run(app, host="0.0.0.0", port=port, access_log=False)

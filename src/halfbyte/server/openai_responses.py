from fastapi import APIRouter


def router(service):
    return APIRouter()
